"""The linear layers of modules with one head: others in their place, and what does not fit them."""

import pytest
import torch
from torch import nn

from fastattn import (
    AdditiveAttention,
    HardAttention,
    LocalAttention,
    LocationSensitiveAttention,
    LuongAttention,
    SelfAttention,
)

D, N = 8, 5
MODULES = {
    "additive": lambda **o: AdditiveAttention(D, D, 4, **o),
    "location": lambda **o: LocationSensitiveAttention(D, D, 4, filters=3, kernel_size=3, **o),
    "luong-general": lambda **o: LuongAttention(D, method="general", **o),
    "luong-concat": lambda **o: LuongAttention(D, method="concat", **o),
    "hard": lambda **o: HardAttention(D, **o).eval(),
    "local": lambda **o: LocalAttention(D, method="concat", window=2, **o),
    "self": lambda **o: SelfAttention(D, 2, **o),
}
CONCAT = [name for name in MODULES if name not in ("luong-general", "self")]


def called(name, module, features=(D, D), dtypes=(torch.float32,) * 2):
    """The output for queries and keys of these features and dtypes."""
    shapes = ((2, features[0]) if name == "location" else (2, 3, features[0])), (2, N, features[1])
    q, k = (
        torch.linspace(-1, 1, torch.Size(s).numel()).view(s).to(dtype)
        for s, dtype in zip(shapes, dtypes, strict=True)
    )
    if name == "self":
        return module(q)[1]
    values = torch.ones(2, N, D, dtype=dtypes[0]) * torch.arange(N)[:, None]
    out = module(q, k, values.to(dtypes[0]))
    return out[0] if name == "location" else out


def owner(module):
    """The module whose layers are called and read."""
    return getattr(module, "score", module)


class Adapter(nn.Module):
    """A layer without any attribute of nn.Linear."""

    def __init__(self, layer):
        super().__init__()
        self.inner = layer

    def forward(self, x):
        return self.inner(x)


class Casting(nn.Linear):
    """A layer whose parameters have another dtype than its inputs."""

    def forward(self, x):
        return super().forward(x.float())


@pytest.mark.parametrize("wrap", [nn.Sequential, Adapter])
@pytest.mark.parametrize("name", MODULES)
def test_any_layer_that_computes_the_same(name, wrap):
    module = MODULES[name]()
    expected = called(name, module)
    part = owner(module)
    for layer in ("W_q", "W_k", "W_a", "W_c", "in_proj"):
        for place in {part, module}:
            if getattr(place, layer, None) is not None:
                setattr(place, layer, wrap(getattr(place, layer)))
    assert torch.equal(called(name, module), expected)


def test_layers_without_parameters():
    module = AdditiveAttention(D, D, D)
    module.W_q = module.W_k = nn.Identity()
    assert called("additive", module).shape == (2, 3, D)


@pytest.mark.parametrize("name", ["additive", "location", "hard"])
def test_lazy_layers(name):
    module = MODULES[name]()
    part = owner(module)
    part.W_q = nn.LazyLinear(part.W_k.out_features)
    called(name, module)
    assert part.W_q.in_features == D


def test_a_layer_that_casts():
    module = AdditiveAttention(D, D, 4)
    module.W_q, module.W_k = Casting(D, 4), Casting(D, 4)
    x = torch.randn(2, 3, D)
    assert module(x.half(), x.half(), x).dtype == torch.float32


@pytest.mark.parametrize("name", MODULES)
def test_features_that_do_not_fit(name):
    module = MODULES[name]()
    rows = {"location": "query", "self": "x"}.get(name, "queries")
    with pytest.raises(ValueError, match=rf"{rows}: expected 8 features, got \[2, .*6\]"):
        called(name, module, (6, D))
    if name in CONCAT:
        with pytest.raises(ValueError, match=r"keys: expected 8 features, got \[2, 5, 6\]"):
            called(name, module, (D, 6))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_features_of_compiled_code_for_any_size(name):
    """Sizes are symbols there, features too."""
    module = MODULES[name]()
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(called(name, compiled), called(name, module))


SIZES = {
    "additive": (AdditiveAttention, dict(query_dim=D, key_dim=D, hidden_dim=D)),
    "location": (LocationSensitiveAttention, dict(query_dim=D, key_dim=D, hidden_dim=D)),
    "luong": (LuongAttention, dict(query_dim=D, key_dim=D, hidden_dim=D, value_dim=D)),
    "hard": (HardAttention, dict(query_dim=D, key_dim=D, hidden_dim=D)),
}


@pytest.mark.parametrize("name", MODULES)
def test_every_parameter_is_where_and_what_the_caller_says(name):
    module = MODULES[name](device="meta", dtype=torch.float64)
    assert {(x.device.type, x.dtype) for x in module.parameters()} == {("meta", torch.float64)}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_none(name):
    module, sizes = SIZES[name]
    method = {"method": "concat"} if "value_dim" in sizes else {}
    module(**sizes, **method)
    for size in sizes:
        for bad in (0, -1):
            with pytest.raises(ValueError, match=f"{size}: expected 1 or more, got {bad}"):
                module(**sizes | {size: bad}, **method)
        with pytest.raises(TypeError, match=f"{size}: expected an int, got float"):
            module(**sizes | {size: 2.5}, **method)


def test_features_that_no_score_reads():
    x = torch.randn(2, 3, 6)
    module = LocalAttention(D)
    with pytest.raises(ValueError, match=r"queries: expected 8 features, got \[2, 3, 6\]"):
        module(x, torch.randn(2, 3, D))
    module = LuongAttention(D)
    with pytest.raises(ValueError, match=r"values and queries: expected 16 features, got .*14\]"):
        module(torch.randn(2, 3, D), torch.randn(2, 3, D), x)


@pytest.mark.parametrize("name", MODULES)
def test_dtypes_that_do_not_fit(name):
    module = MODULES[name]()
    rows = {"location": "query", "self": "x"}.get(name, "queries")
    half, single = torch.float16, torch.float32
    with pytest.raises(TypeError, match=f"{rows}: expected torch.float32.*got torch.float16"):
        called(name, module, dtypes=(half, single))
    if name in CONCAT:
        with pytest.raises(TypeError, match=r"keys: expected torch.float32.*got torch.float16"):
            called(name, module, dtypes=(single, half))


@pytest.mark.parametrize(
    "options", [dict(filters=3, kernel_size=3), dict(filters=0, coverage=True)]
)
def test_dtype_of_a_cache(options):
    module = LocationSensitiveAttention(D, D, 4, **options)
    x, cache = torch.randn(2, D), torch.randn(2, N, 4).half()
    with pytest.raises(TypeError, match=r"keys or cache: expected torch.float32.*torch.float16"):
        module(x, None, torch.randn(2, N, D), cache=cache)


def test_errors_of_layers_stay_as_they_are():
    class Fails(nn.Linear):
        def forward(self, x):
            raise RuntimeError("of its own")

    module = AdditiveAttention(D, D, 4)
    module.W_q = Fails(D, 4)
    with pytest.raises(RuntimeError, match="of its own"):
        called("additive", module)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="of its own"):
        called("additive", module, dtypes=(torch.bfloat16, torch.float32))


@pytest.mark.parametrize("name", ["additive", "luong-concat", "hard", "local"])
def test_no_tensors_and_no_dims(name):
    module, x = MODULES[name](), torch.randn(2, 3, D)
    with pytest.raises(TypeError, match="keys: expected a Tensor, got list"):
        module(x, [1, 2], x)
    with pytest.raises(TypeError, match="keys: expected a Tensor, got NoneType"):
        module.project_keys(None)
    for fits, found in ((module.W_k if name == "additive" else module.score.W_k, "8 features"),
                        (nn.Identity(), "features in its last dim")):  # fmt: skip
        owner(module).W_k = fits
        with pytest.raises(ValueError, match=rf"keys: expected {found}, got \[\]"):
            module.project_keys(torch.tensor(1.0))
    assert name == "local" or module.project_keys(x[0]) is not None  # any dims before the last


# ---- layers whose weights are read ----


@pytest.mark.parametrize("name", CONCAT)
def test_weights_that_are_read_may_be_parametrized(name):
    module = MODULES[name]()
    expected = called(name, module)
    nn.utils.parametrizations.weight_norm(owner(module).w_v)
    torch.testing.assert_close(called(name, module), expected)
    if name == "local":
        for layer in (module.W_p, module.v_p):
            nn.utils.parametrizations.weight_norm(layer)
        torch.testing.assert_close(called(name, module), expected)


@pytest.mark.parametrize("layer", ["w_v", "W_p", "v_p"])
def test_weights_that_are_no_tensors(layer):
    for name in CONCAT if layer == "w_v" else ["local"]:
        module = MODULES[name]().eval()
        part = owner(module) if layer == "w_v" else module
        setattr(part, layer, nn.Sequential(getattr(part, layer)))
        with pytest.raises(TypeError, match=rf"{layer}: expected .* Tensor.*Sequential"):
            called(name, module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CONCAT)
def test_dynamic_quantization(name):
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    module = MODULES[name]().eval()
    with pytest.raises(TypeError, match=r"expected a layer with a Tensor as its weight.*Linear"):
        called(name, quantize(module, {nn.Linear}))
    prefix = "" if owner(module) is module else "score."
    some = quantize(module, {f"{prefix}W_q", f"{prefix}W_k"})
    assert "DynamicQuantized" in repr(owner(some).W_q)
    torch.testing.assert_close(called(name, some), called(name, module), atol=0.1, rtol=0.1)
