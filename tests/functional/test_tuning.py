"""fastattn.autotune without Triton: which problem is that of a call."""

import pytest
import torch

import fastattn
from fastattn import tuning

Q = torch.randn(1, 2, 20, 8)


@pytest.mark.parametrize("score", ["dot", "gaussian", "additive"])
def test_a_problem_has_every_argument_of_its_function(score):
    own = {"gaussian": {"bandwidth": 0.5}, "additive": {"weight": torch.randn(2, 8)}}
    options = dict(return_lse=True, backend="triton", is_causal=True, **own.get(score, {}))
    if score != "gaussian":
        options["sink"] = torch.randn(2)
    inputs = tuning._inputs(Q, None, None, options.pop("weight", None), options)
    assert inputs.p.score == score
    assert inputs.p.mask.causal == "top_left"
    drawn = tuning._inputs(inputs.p, None, None, None, {})
    assert (drawn.w is None) == (score == "dot")
    assert drawn.w is None or score == "additive" or (drawn.w > 0).all()


def test_a_score_by_name():
    longer, score = 3.0 * Q, {"score": "cosine", "scale": 2.0}
    inputs = tuning._inputs(longer, None, None, None, score)
    assert (inputs.p.score, inputs.p.scale) == ("dot", 2.0)
    torch.testing.assert_close(inputs.q.norm(dim=-1), torch.ones(1, 2, 20))
    assert tuning._inputs(Q, None, None, None, {"score": "gaussian"}).p.score == "gaussian"


def test_a_problem_beside_other_arguments():
    problem = tuning._inputs(Q, None, None, None, {}).p
    for other in ({"is_causal": True}, {"key": Q}):
        with pytest.raises(TypeError, match="expected no other"):
            fastattn.autotune(problem, **other)


def test_an_argument_of_no_function():
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        fastattn.autotune(Q, causal=True)
