"""examples/shared_prompt runs in its smoke size; it compares its results itself."""

import pytest
import torch
from programs import META, pictures, smoke


def test_a_prompt_is_kept_once(tmp_path):
    result = smoke("shared_prompt", tmp_path)
    assert pictures(tmp_path) == {"samples.png"}
    assert list(result["samples"]) == ["1", "4"]
    caches = {name: row["cache MiB"] for name, row in result["samples"]["4"].items()}
    assert caches["prompt once, merged"] < caches["prompt copied"] / 2


@pytest.mark.parametrize("way", ["merged", "copied"])
def test_ways_are_equal(way):
    from examples.shared_prompt import __main__ as program

    step = program.draw(3, 40, 5, torch.device("cpu"))
    torch.testing.assert_close(getattr(program, way)(step), program.plain(step))


def test_goes_to_the_device():
    from examples.shared_prompt import __main__ as program

    step = program.draw(2, 4, 3, META)
    assert {x.device for x in (step.query, *step.prompt, *step.own, *step.copied)} == {META}
