"""Which positions ranks hold: every position once, and what that costs each rank."""

import itertools
import random
import statistics
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from bench import context
from bench.context import imbalance
from fastattn import Mask
from fastattn.backends import flops
from fastattn.distributed import Layout, operators
from fastattn.distributed.heads import heads_of_ranks
from fastattn.problem.schemas import Call

SIZES = (0, 1, 2, 7, 8, 100, 129, 1000)
KINDS = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "zigzag-1": lambda n, ranks: Layout.zigzag(n, ranks, unit=1),
    "balanced": lambda n, ranks: Layout.balanced(range(n), ranks),
    "balanced-4": lambda n, ranks: Layout.balanced(range(n), ranks, 3, unit=4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_position_is_held_once(kind, ranks):
    for n in SIZES:
        layout = KINDS[kind](n, ranks)
        own = [layout.positions(rank) for rank in range(ranks)]
        assert torch.equal(torch.cat(own).sort().values, torch.arange(n))
        assert tuple(map(len, own)) == layout.sizes
        assert all(torch.equal(x, x.sort().values) for x in own)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_join_to_the_whole(kind):
    for n, ranks in itertools.product(SIZES, (1, 2, 5)):
        layout, x = KINDS[kind](n, ranks), torch.randn(2, n, 3)
        parts = [layout.take(x, 1, rank) for rank in range(ranks)]
        assert all(
            torch.equal(part, x[:, layout.positions(rank)]) for rank, part in enumerate(parts)
        )
        assert torch.equal(layout.join(parts, 1), x)


def test_empty_pieces_lie_anywhere():
    layout = Layout(8, (((2, 2), (3, 8)), ((0, 3),)))
    assert layout.sizes == (5, 3)


def test_compiled_calls_know_the_numbers_of_a_layout():
    """Pieces are sorted, which symbols cannot be."""
    layout, x = Layout.zigzag(10, 2, unit=1), torch.randn(2, 10)

    def whole(x):
        return layout.join([layout.take(x, 1, rank) for rank in range(2)], 1)

    torch._dynamo.reset()
    compiled = torch.compile(whole, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x), x)


def test_contiguous_is_torch_chunk():
    for n, ranks in itertools.product((0, 1, 5, 8, 17), (1, 2, 3, 4)):
        chunks = [len(x) for x in torch.arange(n).chunk(ranks)] if n else []
        assert [x for x in Layout.contiguous(n, ranks).sizes if x] == [x for x in chunks if x]


def test_zigzag_pairs_the_first_with_the_last():
    assert Layout.zigzag(16, 2, unit=4).pieces == (((0, 4), (12, 16)), ((4, 8), (8, 12)))
    assert list(Layout.zigzag(10, 2, unit=4).of(0)) == [(0, 0, 4)]


@pytest.mark.parametrize(("length", "ranks"), [(2049, 4), (3000, 8), (8193, 8), (131073, 256)])
def test_zigzag_is_balanced_at_any_length(length, ranks):
    """Chunks that are full but for the last would leave some ranks twice the cost of others."""
    cost = torch.arange(1, length + 1)
    chunk = length // (2 * ranks)
    layout = Layout.zigzag(length, ranks, unit=min(128, chunk))
    assert imbalance(layout, cost) < 1 + 2 * min(128, chunk) / (2 * chunk)


@pytest.mark.parametrize("unit", [1, 4, 128])
def test_chunks_begin_at_multiples_of_the_unit(unit):
    for layout in (
        Layout.zigzag(1000, 3, unit),
        Layout.balanced(range(1000), 3, unit=unit),
    ):
        assert all(a % unit == 0 for own in layout.pieces for a, b in own if a < b)


# ---- balance, by counts of kept pairs; docs/distributed.md has these numbers ----


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_attention_is_balanced_by_zigzag(ranks):
    cost = torch.arange(1, 16385)
    assert imbalance(Layout.zigzag(16384, ranks), cost) < 1.0001
    expected = 2 - 1 / ranks
    assert imbalance(Layout.contiguous(16384, ranks), cost) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_are_balanced_by_cost(ranks, causal):
    found = []
    for seed in range(5):
        rng, lengths = random.Random(seed), []
        while sum(lengths) < 16384:
            drawn = max(16, int(rng.lognormvariate(6.5, 1.2)))
            lengths.append(min(16384 - sum(lengths), drawn))
        mask = Mask.documents(lengths=lengths, causal=causal)
        cost = (mask.kv_len - mask.kv_begin)[0]
        found.append([imbalance(Layout.balanced(cost, ranks, n), cost) for n in (4, 16)])
    four, sixteen = (statistics.mean(x) for x in zip(*found, strict=True))
    assert four < 1.10
    assert sixteen < 1.01


def test_positions_are_where_they_are_wanted():
    """Those of a rank without pieces too."""
    for rank in (0, 1):
        own = Layout(4, (((0, 4),), ())).positions(rank, "meta")
        assert own.is_meta
        assert own.dtype == torch.int64


def test_heads_go_to_ranks_in_groups():
    """Or ranks share a key head, if each needs no other."""
    assert heads_of_ranks(6, 3, 2) == ([(0, 2), (2, 6)], [(0, 1), (1, 3)])
    queries, keys = heads_of_ranks(8, 2, 4)
    assert queries == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert keys == [(0, 1), (0, 1), (1, 2), (1, 2)]
    for H, Hkv, ranks in ((6, 3, 4), (3, 1, 4), (0, 0, 2)):
        with pytest.raises(ValueError, match=f"{ranks} ranks cannot share {H} query heads"):
            heads_of_ranks(H, Hkv, ranks)


@pytest.mark.parametrize("name", ["shared_forward", "shared_backward"])
def test_operations_are_those_of_own_rows_and_all_keys(name):
    q, k, v, keys = (1, 4, 5, 8), (1, 2, 3, 8), (1, 2, 3, 6), 11
    layouts = (operators._numbers(Layout.contiguous(n, 2)) for n in (9, keys))
    words = operators.Words("gather", "", "cpu", None, None, (), *layouts, 1)
    count = flop_registry[getattr(torch.ops.fastattn, name)]
    beside = [None] * (len(Call._fields) - 3)
    formula = flops.forward if name == "shared_forward" else flops.backward
    assert count(*words, q, k, v, *beside) == formula(q, (1, 2, keys, 8), (1, 2, keys, 6))


def test_a_rank_has_no_more_chunks_than_others():
    assert Layout.balanced([9, 1, 1, 1], 2, 2, unit=1).sizes == (2, 2)


def test_a_batch_shares_one_layout():
    """Whose costs are sums over samples: a longer sequence of all would be no layout of theirs."""
    costs = torch.rand(3, 40)
    for batch in (costs, costs[:, None], costs.T[..., None], costs[0, 0]):
        with pytest.raises(ValueError, match=r"cost: expected \[length\].*write cost\.sum\(0\)"):
            Layout.balanced(batch, 2)
    layout = Layout.balanced(costs.sum(0), 2, unit=4)
    assert layout == Layout.balanced(costs.sum(0)[None], 2, unit=4)
    assert layout.length == 40
    for other in (torch.ones(39), torch.ones(41)):
        with pytest.raises(ValueError, match=f"cost: expected 40 positions, got {len(other)}"):
            layout.loads(other)


def test_the_page_has_the_table_that_the_script_prints():
    page = Path(__file__).parents[2] / "docs/distributed.md"
    assert "\n".join([*context.HEAD, *context.rows()]) in page.read_text("utf-8")


# ---- what is refused ----


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ((((0, 3),), ((4, 8),)), "each position once"),
        ((((0, 5),), ((4, 8),)), "each position once"),
        ((((0, 4),), ((4, 7),)), "each position once"),
        ((((4, 8), (0, 4)),), "ascending"),
        ((((0, 8),), ((8, 7),)), "pieces: expected 8 or more"),
    ],
)
def test_pieces_that_are_no_sequence(pieces, match):
    with pytest.raises(ValueError, match=match):
        Layout(8, pieces)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Layout(10, None), TypeError, r"expected the intervals \(begin, end\) .* got None"),
        (lambda: Layout(10, ((0, 10),)), TypeError, "pieces: expected the intervals"),
        (lambda: Layout(10, (((0, 5, 10),),)), TypeError, "pieces: expected the intervals"),
        (lambda: Layout.contiguous(8, 0), ValueError, "ranks: expected 1 or more"),
        (lambda: Layout.contiguous(8.0, 2), TypeError, "length: expected an int"),
        (lambda: Layout.zigzag(8, 2, unit=0), ValueError, "unit: expected 1 or more"),
        (lambda: Layout.balanced([1, 2], 2, blocks=True), TypeError, "blocks: expected an int"),
    ],
)
def test_numbers_that_are_none(make, error, match):
    with pytest.raises(error, match=match):
        make()
