"""Side-by-side timings: `python -m bench --suite cpu`.

    suites.py    the workloads: problems as rows of data
    peers.py     the implementations that are timed, a small adapter each
    measure.py   one measurement, in a process of its own, so that its peak memory is its own
    report.py    the Markdown table and the plot
    order.py     `--suite order`: fixed against any order of additions on a GPU
    mesh.py      `--suite mesh`: all devices of this machine beside one of them
    step.py      `--suite step`: a training step on packed documents, by attention
    interleaved.py
                 interleaved wall-clock times of compiled steps

    device.py, inputs.py, kernel_times.py, gpu_peers.py, torch_flex.py
                 `--suite gpu`: device times, one process for each peer
    decode_cases.py, decode_peers.py, decode_torch.py
                 `--suite decode`: few queries over long caches, in the processes of device.py

To add a suite, add rows to `suites.SUITES`; to add a peer, an adapter to `peers.PEERS`.
"""
