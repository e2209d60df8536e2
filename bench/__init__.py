"""The benchmark suite: fastattn beside PyTorch, in one run on one machine.

    cases.py    the named cases: shapes, masks, inputs, and how much work they are
    peers.py    what runs a case: ours, and the ways PyTorch offers
    packed.py   of those, what users do with packed documents
    packages.py of those, other packages': onnxruntime, OpenVINO, flash-attn, xformers
    check.py    whether a result is right; a wrong one is not reported
    measure.py  time, interleaved
    memory.py   peak extra memory, in processes of their own
    suite.py    all of that, case by case
    limits.py   what the machine can do at most, and a case at least needs;  roofline.py its picture
    report.py   rows, the table, the JSON;  plot.py the picture;  machine.py where it ran
    run.py      the command: python -m bench.run --help
    compare.py  whether a run is slower than another one;  summary.py README's tables
    scaling.py  how time and memory grow with the length
    test_bench.py  the same cases through pytest-benchmark, for its own reports and comparisons

What a call of the Triton backend costs on the host:

    host.py     the command: python -m bench.host --help
    stand_in.py what takes the driver's place where there is no GPU

Several processes on one sequence:

    distributed.py  the command: python -m bench.distributed --help
    ranks.py    processes as the ranks of a group;  ways.py the ways in which they compute a case
    context.py  what ranks send, and how even their work is, by counts

A new case is one entry of ``cases.CASES`` or ``GPU_CASES``; a new peer is one in ``peers.py``.
"""
