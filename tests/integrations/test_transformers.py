"""Models of transformers with fastattn inside, beside the same with their eager attention."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", "5", reason="make test-integrations has it")

import tiny_models  # noqa: E402
from tiny_models import FAMILIES, LENGTH  # noqa: E402

import fastattn  # noqa: E402
from fastattn.integrations.transformers import register  # noqa: E402
from fastattn.testing import assert_within_budget, error, largest  # noqa: E402

register()
WORKING = list(FAMILIES)
TEXT = [n for n in WORKING if FAMILIES[n].inputs == "tokens"]
DECODERS = [n for n in WORKING if FAMILIES[n].kind == "decoder"]
GENERATING = [n for n in WORKING if FAMILIES[n].kind in ("decoder", "seq2seq")]


def twins(name, **changes):
    """(ours, eager, the truth in float64), of the same parameters.

    The truth is torch's attention where the model allows, as eager may round softmax to float32.
    """
    peer = tiny_models.build(name, **changes)
    ours, truth = copy.deepcopy(peer), copy.deepcopy(peer).double()
    ours.set_attn_implementation("fastattn")
    if name in ("gpt_oss", "deepseek_v4"):
        truth.set_experts_implementation("eager")  # the other one has no float64
    elif name not in ("gemma2", "detr", "git", "bigbird_pegasus", "beit"):
        truth.set_attn_implementation("sdpa")
    return ours, peer, truth


def first(output):
    """The hidden states or logits, [B, ..., n]."""
    if getattr(output, "image_embeds", None) is not None:
        return torch.cat([output.text_embeds, output.image_embeds])
    return output.logits if "logits" in output else output[0]


def results(model, inputs):
    """What counts of the output, and the gradient of every parameter."""
    model.zero_grad()
    x = first(model(**inputs))
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape == x.shape[:2]:
        x = x[mask.bool()]
    rng = torch.Generator().manual_seed(3)
    (x * torch.randn(x.shape, generator=rng).to(x.dtype)).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return x.detach(), grads


def check(models, inputs, wide=None):
    """Output and gradients of the first of three models, within the budget of the others.

    Through a whole model, luck decides which attention of torch's rounds less. The worse counts.
    """
    ours, peer, truth = models
    plain = [results(peer, inputs)]
    if truth.config._attn_implementation == "sdpa":
        peer.set_attn_implementation("sdpa")
        plain.append(results(peer, inputs))
    (out, grads), (exact, exact_grads) = results(ours, inputs), results(truth, wide or inputs)
    assert all(grads.keys() == exact_grads.keys() == others.keys() for _, others in plain)
    scale = max(map(largest, exact_grads.values()))

    def compare(x, peers, truth, **options):
        assert_within_budget(x, max(peers, key=lambda y: error(y, truth)), truth, **options)

    compare(out, [x for x, _ in plain], exact, name="output")
    for name in grads:
        peers = [others[name] for _, others in plain]
        compare(grads[name], peers, exact_grads[name], name=name, scale=scale)


@pytest.mark.parametrize("name", WORKING)
def test_output_and_gradients(name):
    check(twins(name), tiny_models.inputs(name), tiny_models.inputs(name, torch.float64))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", lambda layer: setattr(layer, "attn_logit_softcapping", None)),
        ("gpt_oss", lambda layer: layer.sinks.data.fill_(-torch.inf)),
    ],
)
def test_softcaps_and_sinks_reach_the_scores(name, change):
    """Without them the logits differ, by more than rounding. So the tests above see them."""
    model, *_ = twins(name)
    inputs = tiny_models.inputs(name)
    with torch.no_grad():
        found = first(model(**inputs))
        for module in model.modules():
            if hasattr(module, "attn_logit_softcapping") or hasattr(module, "sinks"):
                change(module)
        other = first(model(**inputs))
    assert largest(found - other) > 1e-3 * largest(found)


# Of Gemma 2 there is no truth: its eager attention in float64 is NaN behind left padding.
# MiniMax-M3 counts blocks of keys from the padding on, so that some tokens may see none.
@pytest.mark.parametrize("name", [n for n in TEXT if n not in ("gemma2", "minimax_m3")])
def test_left_padding(name):
    check(twins(name), tiny_models.inputs(name, left=True))


# ---- generating ----


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_same_tokens(name, cache, beams):
    ours, peer, _ = twins(name)
    inputs = tiny_models.inputs(name, left=name in DECODERS and name != "minimax_m3")
    inputs.pop("decoder_input_ids", None)
    tokens = [
        model.generate(
            **inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, num_beams=beams,
            cache_implementation=cache,
        )
        for model in (ours, peer)
    ]  # fmt: skip
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_continuous_batching(name):
    model = tiny_models.build(name)
    model.set_attn_implementation("sdpa")
    prompts = [list(range(3, 3 + length)) for length in (5, 17, 2)]
    config = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    alone = [model.generate(torch.tensor([x]), config)[0, len(x) :].tolist() for x in prompts]
    calls = fastattn.use_for_sdpa(model)
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=4, max_batch_tokens=16)
    made = model.generate_batch(prompts, config, continuous_batching_config=pages)
    assert [x.generated_tokens for x in made.values()] == alone
    assert calls.fastattn
    assert not calls.torch


# ---- packed sequences ----


# These two pack nothing.
@pytest.mark.parametrize("name", [n for n in DECODERS if n not in ("gpt_oss", "minimax_m3")])
def test_packed_sequences_are_apart(name):
    ours, peer, truth = twins(name)
    ids = tiny_models.tokens(LENGTH, LENGTH)["input_ids"]
    cuts = [(0, 5), (5, 7), (7, LENGTH)]
    positions = torch.cat([torch.arange(b - a) for a, b in cuts]).expand(2, -1)
    packed = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    for begin, end in cuts:
        alone = [m(input_ids=ids[:, begin:end], use_cache=False).logits for m in (peer, truth)]
        assert_within_budget(packed[:, begin:end], *alone, name=f"{begin}:{end}")


# ---- weights, training, compiling ----


@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "gpt_oss", "t5"])
def test_weights(name):
    inputs = tiny_models.inputs(name)
    models = twins(name)
    models[2].set_attn_implementation("eager")  # the only one that has them
    outputs = [m(**inputs, output_attentions=True) for m in models]
    kinds = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    kinds = [k for k in kinds if getattr(outputs[2], k, None)]
    assert kinds
    for kind in kinds:
        for layer in zip(*(getattr(x, kind) for x in outputs), strict=True):
            assert layer[0].shape[-2] in (LENGTH, 7)
            assert_within_budget(*layer, name=kind)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt_oss"])
def test_dropout(name):
    key = "attention_probs_dropout_prob" if name == "bert" else "attention_dropout"
    model, *_ = twins(name, **{key: 0.5})
    inputs = tiny_models.inputs(name)
    calm, _ = results(model, inputs)
    model.train()
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(results(model, inputs))
    assert torch.equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][0], runs[2][0])
    assert not torch.equal(runs[0][0], calm)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "mistral"])
def test_gradient_checkpointing(name, reentrant):
    key = "attention_probs_dropout_prob" if name == "bert" else "attention_dropout"
    model, *_ = twins(name, **{key: 0.2})
    model.train()
    inputs, found = tiny_models.inputs(name), []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(0)
        found.append(results(model, inputs))
    assert torch.equal(found[0][0], found[1][0])
    for key, grad in found[0][1].items():
        assert torch.equal(grad, found[1][1][key]), key


@pytest.mark.parametrize(
    "name", ["bert", "llama", "mistral", "gpt_oss", "git", "t5", "vit", "beit"]
)
def test_compiled_in_one_graph(name):
    torch.compiler.reset()
    ours, peer, truth = twins(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    inputs = tiny_models.inputs(name)
    wide = tiny_models.inputs(name, torch.float64)
    got = results(compiled, inputs)[0], results(peer, inputs)[0], results(truth, wide)[0]
    assert_within_budget(*got)


@pytest.mark.parametrize("compiled", [False, True])
def test_refuses_models_that_attend_themselves(compiled):
    """They would add a bool mask to their scores, where the name came at loading."""
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.AutoModel.from_config(config, attn_implementation="fastattn")
    inputs = tiny_models.tokens(LENGTH, 6, left=True)
    model = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(ValueError, match="this model computes attention itself"):
        model(**inputs)


def test_eager_attention_alone_beside_models_of_every_kind():
    """The audio tower of Gemma 4 needs float masks, and the other models of its module do not."""
    config = transformers.Gemma4AudioConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, output_proj_dims=32,
        subsampling_conv_channels=[128, 4],
    )  # fmt: skip
    sound, keep = torch.randn(2, 40, 128), torch.arange(40) < torch.tensor([[40], [24]])
    found = []
    for name in ("eager", "fastattn"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=name).eval()
        found.append(model(sound, keep).last_hidden_state)
    torch.testing.assert_close(*found)


def test_another_name():
    register("ours")
    model = tiny_models.build("bert")
    model.set_attn_implementation("ours")
    assert first(model(**tiny_models.inputs("bert"))).shape == (2, LENGTH, tiny_models.VOCABULARY)
    for name in ("sdpa", "flash_attention_2", "paged|eager"):
        with pytest.raises(ValueError, match="name: expected one that transformers leaves free"):
            register(name)
