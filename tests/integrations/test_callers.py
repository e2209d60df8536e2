"""Models of other packages that call torch's scaled_dot_product_attention, in use_for_sdpa."""

import copy

import pytest
import torch

import fastattn
from fastattn.testing import assert_within_budget, largest

pytest.importorskip("timm", reason="make test-integrations has it, and the others")


def of_timm(name, **options):
    timm = pytest.importorskip("timm")
    return timm.create_model(name, img_size=16, patch_size=8, embed_dim=32, depth=2, **options)


def vit():
    return of_timm("vit_tiny_patch16_224", num_heads=4), ["image"]


def eva():
    return of_timm("eva02_tiny_patch14_224", num_heads=4), ["image"]


def torchvision_vit():
    models = pytest.importorskip("torchvision.models")
    model = models.VisionTransformer(16, 8, 2, 4, 32, 40, num_classes=5)
    torch.nn.init.normal_(model.heads.head.weight)  # which is 0 at first, and so are gradients
    return model, ["image"]


def unet():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=12,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), norm_num_groups=4,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    return model, ["latent", "step", "text"]


def dit():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    return model, ["latent", "step", "class"]


def flux():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=12, pooled_projection_dim=12,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, ["rows", "text", "pooled", "step", "places", "text places"]


def x_transformers():
    package = pytest.importorskip("x_transformers")
    layers = package.Decoder(dim=32, depth=2, heads=4, attn_flash=True, rotary_pos_emb=True)
    return package.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers), ["ids"]


def open_clip():
    package = pytest.importorskip("open_clip.model")
    vision = package.CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=16)
    text = package.CLIPTextCfg(context_length=9, vocab_size=50, width=32, heads=4, layers=2)
    return package.CLIP(16, vision, text), ["image", "ids"]


def transformer():
    return torch.nn.Transformer(32, 4, 2, 2, 40, dropout=0.0, batch_first=True), ["row", "row"]


MODELS = {f.__name__: f for f in (
    vit, eva, torchvision_vit, unet, dit, flux, x_transformers, open_clip, transformer,
)}  # fmt: skip
# How often each calls the function.
CALLS = dict(
    vit=2, eva=2, torchvision_vit=2, unet=8, dit=2, flux=2, x_transformers=2, open_clip=4,
    transformer=6,
)  # fmt: skip


def draw(kinds, dtype):
    rng = torch.Generator().manual_seed(0)
    made = {
        "image": (2, 3, 16, 16), "latent": (2, 4, 8, 8), "text": (2, 5, 12), "rows": (2, 6, 4),
        "pooled": (2, 12), "row": (2, 7, 32), "places": (6, 3), "text places": (5, 3),
    }  # fmt: skip
    whole = {"ids": torch.randint(1, 50, (2, 9), generator=rng), "class": torch.tensor([1, 7])}
    whole["step"] = torch.tensor([1, 5])
    return [
        whole[kind] if kind in whole else torch.randn(made[kind], generator=rng).to(dtype)
        for kind in kinds
    ]


def names(kinds):
    """Flux takes all by name."""
    known = ["hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids"]
    return [*known, "txt_ids"] if "places" in kinds else None


def build(name):
    torch.manual_seed(0)
    model, kinds = MODELS[name]()
    for parameter in model.parameters():  # some begin with 0, and let nothing through
        torch.nn.init.normal_(parameter, std=0.2) if parameter.std(correction=0) == 0 else None
    return model.eval(), kinds


def run(model, kinds, dtype):
    """All that comes out, as one tensor."""
    given = draw(kinds, dtype)
    keywords = dict(zip(names(kinds), given, strict=True)) if names(kinds) else {}
    out = model(**keywords) if keywords else model(*given)
    out = out.sample if hasattr(out, "sample") else out
    return torch.cat([x.flatten() for x in out[:2]]) if isinstance(out, tuple) else out


def results(model, kinds, dtype):
    model.zero_grad()
    out = run(model, kinds, dtype)
    rng = torch.Generator().manual_seed(1)
    (out * torch.randn(out.shape, generator=rng).to(dtype)).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(ours, model, kinds):
    """Ours, as (out, gradients), within the budget of a model as it is."""
    peer = results(model, kinds, torch.float32)
    truth = results(copy.deepcopy(model).double(), kinds, torch.float64)
    assert_within_budget(ours[0], peer[0], truth[0], name="output")
    scale = max(map(largest, truth[1].values()))
    for name in truth[1]:
        got = (x[1][name] for x in (ours, peer, truth))
        assert_within_budget(*got, name=name, scale=scale)


@pytest.mark.parametrize("name", MODELS)
def test_in_the_context(name):
    model, kinds = build(name)
    with fastattn.use_for_sdpa() as calls:
        ours = results(model, kinds, torch.float32)
    assert (calls.fastattn, dict(calls.torch)) == (CALLS[name], {})
    compare(ours, model, kinds)


@pytest.mark.parametrize("name", MODELS)
def test_wrapped(name):
    model, kinds = build(name)
    wrapped = copy.deepcopy(model)
    calls = fastattn.use_for_sdpa(wrapped)
    ours = results(wrapped, kinds, torch.float32)
    assert (calls.fastattn, dict(calls.torch)) == (CALLS[name], {})
    compare(ours, model, kinds)


@pytest.mark.parametrize("name", ["vit", "flux", "transformer", "open_clip"])
def test_compiled_in_one_graph(name):
    torch.compiler.reset()
    model, kinds = build(name)
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(2):  # a context of its own each time, and one graph
            with fastattn.use_for_sdpa():
                ours = run(compiled, kinds, torch.float32)
        [code] = graphs
        # PyTorch's fast path through encoder layers is compiled; replace_attention stops it.
        passed_by = code.count("_transformer_encoder_layer_fwd(")
        assert passed_by == (2 if name == "transformer" else 0)
        assert code.count("fastattn.forward.default(") == CALLS[name] - passed_by
        assert "scaled_dot_product_attention(" not in code
        theirs = run(compiled, kinds, torch.float32)  # outside it is torch's again
        truth = run(copy.deepcopy(model).double(), kinds, torch.float64)
    assert "fastattn" not in graphs[1]
    assert_within_budget(ours, theirs, truth)
