"""examples/translation runs in its smoke size and equals plain PyTorch."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch
from programs import META, gradients, pictures, smoke

from fastattn.testing import assert_within_budget


def test_smoke(tmp_path):
    result = smoke("translation", tmp_path)
    assert pictures(tmp_path) == {
        "alignment-additive.png", "alignment-transformer.png", "steps.png",
    }  # fmt: skip
    assert list(result["kinds"]) == ["none", "additive", "transformer"]
    for row in result["kinds"].values():
        assert row["losses"][-1] < row["losses"][0]
    for kind in ("additive", "transformer"):
        twins = result["kinds"][kind]["equal parameters"]
        assert twins["translated alike"] == twins["sentences"] == 16


@pytest.fixture
def corpus():
    from examples.common.vocabulary import Vocabulary
    from examples.translation import data

    pairs = data.load_pairs(None)[:40]
    source, target = (Vocabulary(chain(*(p[side] for p in pairs)), 1) for side in (0, 1))
    return data.Corpus(pairs, source, target), source, target


def translator(corpus, kind, plain=False):
    from examples.translation.lstm import RecurrentTranslator
    from examples.translation.transformer import Transformer

    torch.manual_seed(0)
    _, source, target = corpus
    sizes = len(source), len(target)
    if kind != "transformer":
        return RecurrentTranslator(*sizes, kind, dim=16, plain=plain).eval()
    options = {"attention": torch.nn.MultiheadAttention} if plain else {}
    return Transformer(*sizes, dim=16, heads=2, layers=2, **options).eval()


@pytest.mark.parametrize("kind", ["additive", "transformer"])
def test_plain_twin(corpus, kind):
    from examples.translation.train import loss

    batch = corpus[0].batch([0, 5, 9])
    ours = translator(corpus, kind)
    peer = translator(corpus, kind, plain=True)
    truth = copy.deepcopy(peer).double()
    logits, grads, weights = [], [], []
    for model in (ours, peer, truth):
        logits.append(model(batch.source, batch.lengths, batch.target))
        weights.append(model.align(batch.source, batch.lengths, batch.target))
        grads.append(gradients(loss(model, batch), model))
    assert_within_budget(*logits, name="logits")
    assert_within_budget(*weights, name="weights")
    for name in grads[0]:
        assert_within_budget(*(g[name] for g in grads), name=name)


KINDS = ("none", "additive", "dot", "general", "concat", "transformer")


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(corpus, kind):
    model, encoded = translator(corpus, kind), corpus[0]
    lengths = [len(english) for english, _ in encoded.encoded]
    short = min(range(len(lengths)), key=lengths.__getitem__)
    long = max(range(len(lengths)), key=lengths.__getitem__)
    alone, together = encoded.batch([short]), encoded.batch([short, long])
    target = alone.target
    logits = model(alone.source, alone.lengths, target)
    beside = model(together.source, together.lengths, together.target[:, : target.shape[1]])
    truth = model.double()(alone.source, alone.lengths, target)
    assert_within_budget(beside[:1], logits, truth)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_caches_give_what_recomputing_gives(corpus, kind, beams):
    """The same tokens, whichever hypotheses survive."""
    from examples.translation.decode import Recomputing, translate

    model, batch = translator(corpus, kind), corpus[0].batch([0, 7, 11, 20])
    found = []
    for _ in range(10):
        # Neither a flat distribution, nor one that repeats a word, as tied embeddings do.
        model.out.weight = torch.nn.Parameter(torch.randn(model.out.weight.shape))
        with torch.no_grad():
            model.target.weight.normal_()
            model.source.weight.normal_()
        sources = batch.source, batch.lengths
        found += translate(model, *sources, beams, max_length=20)
        again = translate(Recomputing(model), *sources, beams, max_length=20)
        assert found[-4:] == again
    assert any(len(set(row)) > 3 for row in found)


def test_a_step_reads_each_key_once(corpus, monkeypatch, extension):
    """Decoding a word computes as many scores as there are keys. All other work is constant: the
    queries that reach the kernel, and the multiplications outside it.
    """
    from torch.utils.flop_counter import FlopCounterMode

    import fastattn

    attended, products = [], []
    attend = fastattn.MultiheadAttention._attend

    def count(module, q, k, v, **options):
        attended.append((q.shape[2], k.shape[2]))
        return attend(module, q, k, v, **options)

    monkeypatch.setattr(fastattn.MultiheadAttention, "_attend", count)
    model, batch = translator(corpus, "transformer"), corpus[0].batch([0, 7, 11])
    N = batch.source.shape[1]
    with torch.no_grad():
        state = model.begin(batch.source, batch.lengths)
        for step in range(40):
            attended.clear()
            with FlopCounterMode(display=False) as counter:
                model.next_words(batch.target[:, :1], state)
            assert attended == [(1, step + 1), (1, N)] * len(model.decoder)
            counts = counter.get_flop_counts()["Global"].items()
            products.append(sum(n for op, n in counts if "fastattn" not in str(op)))
    first, *others = products  # the first projects the keys of the source
    assert first > others[0] > 0
    assert set(others) == {others[0]}


def test_hypotheses_of_a_source_share_its_projection(corpus):
    """Their number does not multiply the projections."""
    model, batch = translator(corpus, "transformer"), corpus[0].batch([0, 7])
    with torch.no_grad():
        state = model.begin(batch.source, batch.lengths)
        model.next_words(batch.target[:, :1], state)
        before = [caches.source.key.clone() for caches in state.caches]
        rows = torch.tensor([0, 0, 0, 1, 1, 1])
        state.reorder(rows)
        model.next_words(batch.target[rows, :1], state)
    for caches, key in zip(state.caches, before, strict=True):
        assert torch.equal(caches.source.key, key[rows])


def test_positions():
    """Column 2 i is sin(position / 10000^(2 i / dim)); the next column is the cosine."""
    import math

    from examples.translation.transformer import positions

    table = positions(3, 5, 6)
    assert table.shape == (2, 6)
    for row, place in zip(table.tolist(), (3, 4), strict=True):
        for i in range(3):
            angle = place / 10000 ** (2 * i / 6)
            assert row[2 * i] == pytest.approx(math.sin(angle), abs=1e-7)
            assert row[2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-7)


def test_warm_up(corpus):
    from examples.translation.train import optimization

    optimizer, schedule = optimization(translator(corpus, "transformer"), steps=100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    top = rates.index(max(rates))
    assert 10 <= top < 30
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[0] < 0.1 * rates[top]
    assert rates[-1] < 0.1 * rates[top]


def test_results_of_other_kinds_stay(tmp_path, monkeypatch):
    """Results of other kinds stay if the earlier run had the same options."""
    from examples.translation import __main__ as program

    monkeypatch.setattr(program, "SHOWN", ())
    monkeypatch.setattr(program, "score", lambda *_: {})
    run = ["--smoke", "--device", "cpu", "--out", str(tmp_path)]
    assert list(program.main(run)["kinds"]) == ["none"]
    (tmp_path / "result.json").write_text(
        (tmp_path / "result.json").read_text("utf-8").replace('"none"', '"dot"'), "utf-8"
    )
    assert list(program.main(run)["kinds"]) == ["none", "dot"]
    assert list(program.main([*run, "--seed", "1"])["kinds"]) == ["none"]


def test_beam_search_finds_the_best(corpus):
    """With as many beams as words, two steps try everything. Greedy decoding misses some."""
    from examples.common.vocabulary import END
    from examples.translation.decode import translate

    model, words = translator(corpus, "additive"), [END, 7, 8, 9, 10, 11]
    forbidden = torch.ones(model.out.out_features, dtype=torch.bool)
    forbidden[words] = False
    missed = 0
    for _ in range(10):
        with torch.no_grad():  # a distribution that is not flat and depends on the last word
            model.target.weight.normal_(std=5.0)
            model.out.weight.normal_(std=5.0)
            model.out.bias.masked_fill_(forbidden, -torch.inf)
        batch = corpus[0].batch([3, 8])
        wide = translate(model, batch.source, batch.lengths, len(words), max_length=2)
        assert wide == exhaustive(model, batch, words)
        missed += wide != translate(model, batch.source, batch.lengths, 1, max_length=2)
    assert missed


@torch.no_grad()
def exhaustive(model, batch, words) -> list[list[int]]:
    """For each sample, the likeliest by mean of all sequences: END alone, or two words."""
    from examples.common.vocabulary import BEGIN, END

    candidates = [[END], *([a, b] for a in words if a != END for b in words)]
    means = []
    for sequence in candidates:
        target = torch.tensor([[BEGIN, *sequence]]).expand(len(batch.source), -1)
        scores = model(batch.source, batch.lengths, target[:, :-1]).log_softmax(-1)
        means.append(scores.gather(2, target[:, 1:, None]).mean(dim=(1, 2)))
    best = torch.stack(means).argmax(dim=0)
    return [[word for word in candidates[n] if word != END] for n in best]


def test_pages_are_read(tmp_path):
    from examples.translation import fetch

    text = {
        "en-US": '<p id="par_id1" class="paragraph">Press <span class="MAC"><span>Cmd'
        "</span>+1</span><span>Ctrl</span> to open it.</p>"
        '<p id="par_id2" class="code">Print the four words here</p>'
        '<p class="related">This one has no id</p>'
        '<h2 id="hd_id3">Too short</h2>',
        "zh-CN": '<p id="par_id1">按 Ctrl 打开。</p><h2 id="hd_id3">太短</h2>',
    }
    for language, page in text.items():
        (tmp_path / language).mkdir()
        (tmp_path / language / "page.html").write_text(page, encoding="utf-8")
    assert fetch.align(tmp_path) == [("Press Ctrl to open it.", "按 Ctrl 打开。")]


def test_tokens():
    from examples.translation.data import tokenize
    from examples.translation.train import join

    tokens = tokenize("打开 LibreOffice Calc,按 F1。")
    assert tokens == ["打", "开", "libreoffice", "calc", ",", "按", "f1", "。"]
    assert join(tokens) == "打开libreoffice calc,按f1。"


def test_on_another_device():
    from examples.translation import __main__ as program
    from examples.translation import decode, train

    corpora, *words = program.prepare(True, 0, 20, META)
    model = program.build("transformer", *words).to(META)
    batch = corpora[0].batch([0, 1, 2])
    train.loss(model, batch).backward()
    assert all(x.grad.is_meta for x in model.parameters())
    # One word of two hypotheses each; then it must know whether all have ended.
    with pytest.raises(RuntimeError, match="item"):
        decode.translate(model, batch.source, batch.lengths, beams=2)
