"""Muon for the matrices, in batches of equal shape.

``torch.optim.Muon`` takes one 2-D parameter at a time, always in bf16; here heads and experts are
orthogonalised each for itself, and in the precision that this CPU is fast in.
"""
import torch
from torch import Tensor


def orthogonalise(m: Tensor, steps: int = 5) -> Tensor:
    """Nearly orthogonal matrices of the same row and column spaces; m is [batch, out, in].

    The quintic Newton-Schulz iteration of Muon (Jordan et al., 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = m.shape[-2] > m.shape[-1]
    x = m.mT if tall else m  # [batch, small, large]
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT  # [batch, small, small]
        x = a * x + (b * gram + c * gram @ gram) @ x  # [batch, small, large]
    return x.mT if tall else x


class Muon:
    """Nesterov momentum, orthogonalised, with decoupled weight decay.

    q_b_proj and kv_b_proj of MLA hold one matrix for each of ``heads``; everything else is one matrix.
    """

    def __init__(self, params: dict[str, Tensor], heads: int, momentum=0.95, decay=0.02,
                 dtype=torch.float32) -> None:
        self.params, self.momentum, self.decay, self.dtype = params, momentum, decay, dtype
        self.buffers = {name: torch.zeros_like(p) for name, p in params.items()}
        self.groups: dict[tuple[int, int], list[str]] = {}
        self.heads = heads
        for name, p in params.items():
            _, out, inner = self._split(name, p).shape
            self.groups.setdefault((out, inner), []).append(name)

    def _split(self, name: str, m: Tensor) -> Tensor:
        per_head = name.endswith(("q_b_proj.weight", "kv_b_proj.weight"))
        return m.view(self.heads if per_head else 1, -1, m.shape[-1])

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for (out, inner), names in self.groups.items():
            updates = []
            for name in names:
                grad, buffer = self.params[name].grad, self.buffers[name]
                assert grad is not None
                buffer.lerp_(grad, 1 - self.momentum)
                updates.append(self._split(name, grad.lerp(buffer, self.momentum)).to(self.dtype))
            update = orthogonalise(torch.cat(updates)).float().split([len(u) for u in updates])
            for name, u in zip(names, update, strict=True):
                p = self.params[name]
                p.mul_(1 - lr * self.decay).add_(u.reshape(p.shape), alpha=-lr * max(1, out / inner) ** 0.5)

    def state_dict(self) -> dict:
        return self.buffers

    def load_state_dict(self, state: dict) -> None:
        self.buffers = state
