"""examples/long_context runs in its smoke size; processes together learn what one learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from programs import META, pictures, smoke

from fastattn.distributed import Layout


def test_processes_learn_as_one(tmp_path):
    result = smoke("long_context", tmp_path)
    assert pictures(tmp_path) == {"loss.png"}
    (one,), (first, second) = result["1 process"], result["2 processes"]
    assert one["losses"][-1] < one["losses"][0]
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert first["held_out"] == pytest.approx(one["held_out"], rel=1e-5)
    for row in result["rows"]:
        assert row["MiB sent"] == row["by the table"]
        assert (row["MiB sent"] > 0) == ("processes" in row[""])


def test_no_process_outlives_the_program(tmp_path):
    """Which a signal ends; the others end by themselves."""
    (tmp_path / "waiting.py").write_text(
        "import os, time\n\ndef wait(_):\n    os.write(1, b'here\\n')\n    time.sleep(100)\n"
    )
    program = "from bench.ranks import on_ranks\nfrom waiting import wait\non_ranks(wait, 2)"
    paths = [str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    ) as process:  # fmt: skip
        assert [process.stdout.readline() for _ in range(2)] == ["here\n"] * 2
        process.terminate()
        process.communicate(timeout=30)  # until nobody is left who might write


def test_parts_of_the_loss_add_up():
    """A position's logits do not depend on where it stands in a process's tensors."""
    from examples.long_context import train
    from examples.long_context.model import CharacterModel

    model = CharacterModel(50, 16, 2, 1)
    text, layout = torch.randint(50, (65,)), Layout.zigzag(64, 2, unit=4)
    whole, seen = train.alone(64, torch.device("cpu")), {}

    def remembered(query, key, value):
        seen.update(key=key, value=value)
        return whole.attend(query, key, value)

    loss = train.loss_of(model, text, train.Share(64, whole.positions, remembered))
    parts = []
    for rows in map(layout.positions, range(2)):

        def attend(query, key, value, rows=rows):
            assert torch.equal(key, seen["key"][:, :, rows])
            mask = torch.arange(64) <= rows[:, None]
            return F.scaled_dot_product_attention(query, seen["key"], seen["value"], mask)

        parts.append(train.loss_of(model, text, train.Share(64, rows, attend)))
    torch.testing.assert_close(sum(parts), loss)


def test_windows_are_of_the_text():
    from examples.long_context import data

    vocabulary, text = data.read(most_pages=2)
    assert len(vocabulary) > 30
    assert torch.equal(torch.cat(data.split(text, 100)), text)
    short, generator = text[:103], torch.Generator().manual_seed(0)  # three places for a window
    found = {tuple(data.window(short, 100, generator).tolist()) for _ in range(40)}
    assert found == {tuple(short[n : n + 101].tolist()) for n in range(3)}


def test_processes_and_their_device(tmp_path, capsys, monkeypatch):
    """A GPU for each process, or the CPU for all."""
    from examples.long_context import __main__ as program

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    here = ["--out", str(tmp_path), "--procs"]
    assert [program.parse([*here, n]).device.type for n in "23"] == ["cuda", "cpu"]
    for wrong in (["1"], ["0"], ["3", "--device", "cuda"], ["2", "--device", "cuda:1"]):
        with pytest.raises(SystemExit):
            program.parse(here + wrong)
        assert re.search("expected (2 or more|3 GPUs)|choose from", capsys.readouterr().err)


def test_on_another_device():
    from examples.long_context import train
    from examples.long_context.model import CharacterModel

    model = CharacterModel(50, 16, 2, 1).to(META)
    train.loss_of(model, torch.zeros(33, dtype=torch.int64), train.alone(32, META)).backward()
    assert all(x.grad.is_meta for x in model.parameters())
