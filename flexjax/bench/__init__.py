"""Side-by-side timings: `python -m flexjax.bench --suite cpu`.

    suites.py    what is measured: problems as rows of data
    peers.py     who is measured: one small adapter each
    measure.py   one measurement, in a process of its own so that its peak memory is its own
    report.py    the Markdown table and the plot

    device.py, gpu_peers.py, torch_flex.py   the same for `--suite gpu`: device times, one process a peer

To add a suite, add rows to `suites.SUITES`; to add a peer, an adapter to `peers.PEERS`.
"""
