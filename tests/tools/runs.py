"""A run of the benchmark suite as its file holds it."""


def recorded(ours: float, peer: float, spread: float = 0.0, cpu: str = "c", **changes) -> dict:
    """A run with one row, as in bench.json; ``changes``: of the row."""

    def timing(ms):
        return {"median": ms, "q25": ms * (1 - spread), "q75": ms * (1 + spread)}

    row = dict(case="dense", direction="forward", wrong=False, failure=None, best_peer="torch SDPA")
    row["times_ms"] = {"fastattn": timing(ours), "torch SDPA": timing(peer)}
    about = dict(device="cpu", cpu=cpu, torch_isa="i", threads=2, torch="2", commit=None, date="d")
    return {"schema": 1, "machine": about, "rows": [row | changes]}
