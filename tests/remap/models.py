"""One small model in two layouts: as a hub folder has it, and as a trainer has it; and the map between them."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.remap import Concatenate, PermuteBlocks, Remap, Rename, Stack, Tie, Transpose

HEADS, WIDTH, EXPERTS, HIDDEN, VOCABULARY, LAYERS = 4, 32, 4, 24, 50, 2


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)


class _HubLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.experts = nn.ModuleList(_Expert() for _ in range(EXPERTS))


class Hub(nn.Module):
    """Projections one by one, a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_HubLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))


class NativeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = _Experts()


class Native(nn.Module):
    """One projection for all three, one tensor for all experts, pairs in the place of rotary halves, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(NativeLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tok.weight


HUB_TO_NATIVE = Remap(
    [
        PermuteBlocks("layers.{i}.q_proj.{p}", 0, ("heads", 2, -1), (0, 2, 1)),
        PermuteBlocks("layers.{i}.k_proj.{p}", 0, ("heads // 2", 2, -1), (0, 2, 1)),
        Concatenate(
            ["layers.{i}.q_proj.{p}", "layers.{i}.k_proj.{p}", "layers.{i}.v_proj.{p}"], "layers.{i}.qkv.{p}",
            sizes=("width", "width // 2", "width // 2"),
        ),
        Rename("layers.{i}.o_proj.weight", "layers.{i}.out.weight"),
        Stack("layers.{i}.experts.{e}.w1.weight", "layers.{i}.gate"),
        Stack("layers.{i}.experts.{e}.w3.weight", "layers.{i}.up"),
        Concatenate(["layers.{i}.gate", "layers.{i}.up"], "layers.{i}.experts.gate_up", dim=1),
        Transpose("layers.{i}.experts.gate_up", 1, 2),
        Stack("layers.{i}.experts.{e}.w2.weight", "layers.{i}.experts.down"),
        Rename("embed.weight", "tok.weight"),
        Tie("tok.weight", "head.weight"),
    ],
    {"heads": HEADS, "width": WIDTH},
)  # fmt: skip


def translated(hub: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The map above, written with torch alone."""
    native = {"tok.weight": hub["embed.weight"], "head.weight": hub["embed.weight"]}
    native |= {name: hub[name] for name in ("norm.weight", "norm.bias")}

    def pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
        shape = tensor.shape
        return tensor.reshape(heads, 2, -1, *shape[1:]).transpose(1, 2).reshape(shape)

    for i in range(LAYERS):
        at = f"layers.{i}."
        for p in ("weight", "bias"):
            q, k = pairs(hub[f"{at}q_proj.{p}"], HEADS), pairs(hub[f"{at}k_proj.{p}"], HEADS // 2)
            native[f"{at}qkv.{p}"] = torch.cat([q, k, hub[f"{at}v_proj.{p}"]])
        native[f"{at}out.weight"] = hub[f"{at}o_proj.weight"]
        w1, w2, w3 = (
            torch.stack([hub[f"{at}experts.{e}.{w}.weight"] for e in range(EXPERTS)]) for w in ("w1", "w2", "w3")
        )
        native[f"{at}experts.gate_up"] = torch.cat([w1, w3], 1).transpose(1, 2)
        native[f"{at}experts.down"] = w2
    return native
