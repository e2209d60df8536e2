"""bench.distributed measures every way, and refuses wrong results. Here one rank, in this process.

tests/examples/test_long_context.py starts processes, in the same way.
"""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(monkeypatch):
    """The program, whose one rank is this process."""
    from bench import distributed

    def here(function, size, *args, device):
        return [function(torch.device(device), *args)]

    threads = torch.get_num_threads()
    monkeypatch.setattr(distributed, "on_ranks", here)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield distributed
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def row_of(distributed, **changes):
    fields = dict(case="a", about="", shape="", direction="forward", ranks=2, threads={"heads": 1})
    return distributed.SharedRow(**{**fields, **changes})


def test_writes_every_way_of_every_case(program, tmp_path, capsys):
    from bench.cases import DIRECTIONS

    assert program.main(["--length", "64", "--seconds", "0.001", "--out", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    found = json.loads((folder / "distributed.json").read_text())
    assert found["machine"]["cores"] > 0
    assert [(r["case"], r["direction"]) for r in found["rows"]] == [
        (case.name, d) for case in program.CASES for d in DIRECTIONS
    ]
    for row in found["rows"]:
        assert set(row["threads"]) > set(program.METHODS)
        assert row["times_ms"].keys() == row["peak_extra_bytes"].keys() == row["threads"].keys()
        inputs = 3 if row["direction"] == "forward" else 4
        assert set(row["input_bytes"].values()) == {inputs * 64 * 4 * 64 * 4}
    printed = capsys.readouterr().out
    assert "cores" in printed
    assert "documents fwd+bwd" in printed
    pytest.importorskip("matplotlib")
    assert (folder / "distributed.png").read_bytes().startswith(b"\x89PNG")


def test_processes_and_their_device(program, capsys, monkeypatch):
    """A GPU for each process, or the CPU for all; a short run replaces no results."""
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [program.parse(["--procs", n]).device for n in "123"] == ["cuda", "cuda", "cpu"]
    for wrong in (["--procs", "0"], ["--procs", "5"], ["--procs", "3", "--device", "cuda"]):
        with pytest.raises(SystemExit):
            program.parse(wrong)
        assert "expected" in capsys.readouterr().err
    assert program.parse([]).out == ROOT / "bench/results"
    for partial in (["--length", "64"], ["--seconds", "0.01"], ["--procs", "4"]):
        assert program.parse(partial).out == ROOT / "build/bench"


def test_a_wrong_result_is_not_reported(program):
    assert not row_of(program, error_ratios={"heads": 1.0}).wrong
    for wrong in (
        dict(error_ratios={"heads": 1.01}),
        dict(error_ratios={"heads": math.nan}),
        dict(sent={"heads": 8}, expected={"heads": 4}),
    ):
        row = row_of(program, memory={"heads": 1}, **wrong)
        assert row.wrong
        assert "peak_extra_bytes" not in row.as_json()
        assert "WRONG" in program.table([row])


def test_balance_is_that_of_kept_pairs(program):
    causal, documents = (program.shortened(case, 4096) for case in program.CASES)
    of_causal = program.balance(causal)
    assert of_causal["contiguous"] == [1.5, 1.75, 1.875]
    assert of_causal["zigzag"] == [1.0] * 3
    of_documents = program.balance(documents)
    assert max(of_documents["balanced, blocks=16"]) < 1.05 < min(of_documents["contiguous"])


def test_a_sequence_of_two_tokens_can_be_drawn(program):
    from bench.cases import draw

    for case in program.CASES:
        two = program.shortened(case, 2)
        assert draw(two).q.shape[2] == draw(two.tiny()).q.shape[2] == 2
