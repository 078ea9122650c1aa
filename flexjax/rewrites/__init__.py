"""A call written as another call that a backend can run, one file each."""
