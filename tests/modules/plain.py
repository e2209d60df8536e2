"""Formulas of the papers in plain PyTorch, shared by several modules' tests."""

import torch


def plain_scores(module, queries, keys):
    """Luong's scores for any method."""
    score = module.score
    if score.method == "dot":
        return queries @ keys.mT
    if score.method == "general":
        return queries @ score.W_a.weight.T @ keys.mT
    # The paper's one matrix over [h; s].
    W = torch.cat([score.W_q.weight, score.W_k.weight], dim=1)
    M, N = queries.shape[1], keys.shape[1]
    pairs = torch.cat(
        [queries[:, :, None].expand(-1, -1, N, -1), keys[:, None].expand(-1, M, -1, -1)], dim=-1
    )
    return torch.tanh(pairs @ W.T) @ score.w_v.weight[0]
