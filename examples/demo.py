"""Train a small vision transformer on 8x8 digits with rotary positions, and show it more tokens than it has seen.

Two models, equal but for how they know where a token is: `RoPEEncodingND` on the queries and keys of every
block, or a learned table added to the tokens. Both are then tested in the two ways in which a picture grows:

* finer: the same picture, resized, so that tokens lie closer together;
* wider: a larger canvas at the same scale, with the digit anywhere on it.
"""

import argparse
import math
import time

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

from nd_rotary_encodings import RoPEEncodingND

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

TRAIN_SIZE, STRIDE, WINDOW = 8, 2, 4
# Row of the table: (test, model, options of its forward).
METHODS = {
    "finer: learned table, bicubic": ("finer", "table", {}),
    "finer: RoPE, raw token indices": ("finer", "rope", {"raw_positions": True}),
    "finer: RoPE, scaled positions": ("finer", "rope", {}),
    "wider: learned table, bicubic": ("wider", "table", {}),
    "wider: learned table, log-length": ("wider", "table", {"log_length": True}),
    "wider: RoPE": ("wider", "rope", {}),
    "wider: RoPE, log-length": ("wider", "rope", {"log_length": True}),
}


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, use_rope: bool):
        super().__init__()
        self.heads = heads
        self.rope = RoPEEncodingND(2, dim, heads) if use_rope else None
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, pos: Tensor, sharpen: float) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        if self.rope is not None:
            q, k = self.rope(q, pos, k)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, scale=sharpen / math.sqrt(q.shape[-1]))
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, use_rope: bool, dim: int = 64, heads: int = 4, depth: int = 2):
        super().__init__()
        self.grid = TRAIN_SIZE // STRIDE
        self.patch = nn.Conv2d(1, dim, WINDOW)
        self.table = None if use_rope else nn.Parameter(0.02 * torch.randn(1, dim, self.grid, self.grid))
        self.blocks = nn.ModuleList(Block(dim, heads, use_rope) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def tokens(self, images: Tensor, zoom: float) -> Tensor:
        weight = self.patch.weight
        if zoom != 1:
            # A token must see the same part of the picture at every resolution, or the patches and not the
            # positions decide the test. The kernel is resized for that, as FlexiViT does.
            size = round(WINDOW * zoom)
            weight = F.interpolate(weight, size=(size, size), mode="bilinear") / zoom**2
        pad = (weight.shape[-1] - STRIDE) // 2
        return F.conv2d(F.pad(images, (pad,) * 4), weight, self.patch.bias, stride=STRIDE)

    def forward(self, images: Tensor, zoom: float = 1.0, raw_positions=False, log_length=False) -> Tensor:
        x = self.tokens(images, zoom)
        if self.table is not None:
            same = x.shape[-2:] == self.table.shape[-2:]
            x = x + (self.table if same else F.interpolate(self.table, size=x.shape[-2:], mode="bicubic"))
        x = x.permute(0, 2, 3, 1)
        pos = RoPEEncodingND.position_grid(x.shape).float()
        if not raw_positions:
            # Token centers, in units of the training grid.
            pos = (pos + 0.5) / zoom - 0.5
        x, pos = x.flatten(1, 2), pos.flatten(0, 1)
        sharpen = math.log(x.shape[1]) / math.log(self.grid**2) if log_length else 1.0
        for block in self.blocks:
            x = block(x, pos, sharpen)
        # A mean would be diluted by the blank tokens of a wide canvas.
        return self.head(self.norm(x.amax(1)))


def load_splits() -> dict[str, tuple[Tensor, Tensor]]:
    digits = load_digits()
    images = torch.tensor(digits.images / 8, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target)
    rest, test = train_test_split(np.arange(len(labels)), test_size=450, random_state=0, stratify=labels)
    train, val = train_test_split(rest, test_size=300, random_state=0, stratify=labels[rest])
    return {n: (images[i], labels[i]) for n, i in (("train", train), ("val", val), ("test", test))}


def augment(images: Tensor) -> Tensor:
    """Random shifts of up to a pixel and zooms of up to a third."""
    n = len(images)
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = torch.empty(n).uniform_(-0.3, 0.3).exp()
    theta[:, :, 2] = torch.empty(n, 2).uniform_(-2 / TRAIN_SIZE, 2 / TRAIN_SIZE)
    return F.grid_sample(images, F.affine_grid(theta, list(images.shape), False), align_corners=False)


def train(model: ViT, images: Tensor, labels: Tensor, epochs: int, bar: tqdm) -> None:
    batch, lr = 64, 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05, fused=True)
    steps = epochs * math.ceil(len(images) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.2)
    for _ in range(epochs):
        for index in torch.randperm(len(images)).split(batch):
            loss = F.cross_entropy(model(augment(images[index])), labels[index], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        bar.update()
        bar.set_postfix(loss=f"{loss.item():.2f}")


def enlarge(images: Tensor, size: int, test: str) -> Tensor:
    if test == "finer":
        return F.interpolate(images, size=(size, size), mode="bilinear")
    canvas = images.new_zeros(len(images), 1, size, size)
    corners = np.random.default_rng(size).integers(0, size - TRAIN_SIZE, (len(images), 2), endpoint=True)
    for image, target, (i, j) in zip(images, canvas, corners, strict=True):
        target[:, i : i + TRAIN_SIZE, j : j + TRAIN_SIZE] = image
    return canvas


@torch.inference_mode()
def accuracy(model: ViT, images: Tensor, labels: Tensor, size: int, test: str, options: dict) -> float:
    zoom = size / TRAIN_SIZE if test == "finer" else 1.0
    big = enlarge(images, size, test)
    guesses = torch.cat([model(part, zoom, **options).argmax(1) for part in big.split(75)])
    return 100 * (guesses == labels).float().mean().item()
