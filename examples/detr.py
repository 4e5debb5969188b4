"""Train a small detection transformer on handwritten digits pasted into larger canvases.

Two models, equal but for how attention knows where things are: `RoPEEncodingND` turns queries and keys, or
sine-cosine encodings of the same positions are added to the inputs of their projections, as in DETR. Both
have:

* features of two levels, whose positions (y, x, level) come from `prep_multilevel_positions`;
* object queries at reference points (y, x, level), which each decoder layer moves. Positions may require
  gradients: the points learn where to start, and each layer learns where the next one should look.

Prints mean average precision as COCO defines it, and draws detections.
"""

import argparse
import time

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

from nd_rotary_encodings import (
    RoPEEncodingND,
    get_multilevel_freq_group_pattern,
    prep_multilevel_positions,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZE, STRIDE = 48, 4  # of the canvas and of the finest features, in pixels
CLASSES, MOST = 10, 5  # digits on a canvas: from 1 to MOST
QUERIES, DIM, HEADS, DECODERS = 16, 96, 4, 3


class Attention(nn.Module):
    """Multi-head attention between tokens at positions ``[..., 3]``: y, x, level."""

    def __init__(self, kind: str):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        pattern = get_multilevel_freq_group_pattern(2, "closure")
        self.rope = RoPEEncodingND(3, DIM, HEADS, freq_group_pattern=pattern) if kind == "rope" else None

    def forward(self, x: Tensor, pos: Tensor, memory: Tensor, memory_pos: Tensor) -> Tensor:
        if self.rope is not None:
            q, k = self.rope(self.query(x), pos, self.key(memory), memory_pos)
        else:
            q, k = self.query(x + sine_cosine(pos)), self.key(memory + sine_cosine(memory_pos))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, self.value(memory)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def sine_cosine(pos: Tensor) -> Tensor:
    """``[..., 3]`` to ``[..., DIM]``, with the range of frequencies that RoPE starts from."""
    freqs = 10 ** -torch.linspace(0, 1, DIM // 6)
    angles = (pos[..., None] * freqs).flatten(-2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Decoder(nn.Module):
    """A layer: attention among the queries, attention to the image, and an MLP, each on normalized inputs."""

    def __init__(self, kind: str):
        super().__init__()
        self.self_attention, self.cross_attention = Attention(kind), Attention(kind)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(3))

    def forward(self, x: Tensor, pos: Tensor, memory: Tensor, memory_pos: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.self_attention(normed, pos, normed, pos)
        x = x + self.cross_attention(self.norms[1](x), pos, memory, memory_pos)
        return x + self.mlp(self.norms[2](x))


class DETR(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(32, DIM, 3, stride=2, padding=1),
        )
        self.down = nn.Sequential(nn.GELU(), nn.Conv2d(DIM, DIM, 3, stride=2, padding=1))
        self.decoder = nn.ModuleList(Decoder(kind) for _ in range(DECODERS))
        self.memory_norm, self.norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.queries = nn.Parameter(torch.randn(QUERIES, DIM))
        cells = SIZE // STRIDE
        self.points = nn.Parameter(torch.rand(QUERIES, 3) * torch.tensor([cells, cells, 1]))
        self.classify = nn.Linear(DIM, CLASSES)
        self.locate = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, 4))
        nn.init.constant_(self.classify.bias, -3)  # most queries find nothing
        nn.init.zeros_(self.locate[-1].weight)  # so that the first boxes are at the reference points

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of all levels ``[B, N, DIM]`` and their positions ``[N, 3]``, in cells of the finest."""
        fine = self.stem(images)
        levels = [fine, self.down(fine)]
        shapes = torch.tensor([level.shape[-2:] for level in levels])
        cells = torch.cat([torch.cartesian_prod(*map(torch.arange, shape)) for shape in shapes.tolist()])
        level = torch.arange(len(levels)).repeat_interleave(shapes.prod(-1))
        positions = prep_multilevel_positions(cells, torch.zeros_like(level), level, shapes)
        return torch.cat([level.flatten(2).mT for level in levels], dim=1), positions

    def forward(self, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of each decoder layer, logits ``[B, Q, CLASSES]`` and boxes ``[B, Q, 4]``: center and size."""
        memory, memory_pos = self.features(images)
        memory = self.memory_norm(memory)
        x = self.queries.expand(len(images), -1, -1)
        pos = self.points.expand(len(images), -1, -1)
        outputs = []
        for layer in self.decoder:
            x = layer(x, pos, memory, memory_pos)
            normed = self.norm(x)
            move, log_size = self.locate(normed).chunk(2, dim=-1)
            # Not detached: the next layer's attention tells this one where its points should have gone.
            pos = pos + F.pad(move, (0, 1))
            outputs.append((self.classify(normed), torch.cat((pos[..., :2], 3 * log_size.exp()), dim=-1)))
        return outputs


def load_splits() -> dict[str, tuple[list[Tensor], np.ndarray]]:
    """Digits, each cut to its ink, and their labels."""
    digits = load_digits()
    images = []
    for image in torch.tensor(digits.images / 16, dtype=torch.float32):
        rows, columns = (image.amax(dim).gt(0.2).nonzero() for dim in (1, 0))
        images.append(image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    train, test = train_test_split(np.arange(len(images)), test_size=0.3, random_state=0)
    return {
        name: ([images[i] for i in part], digits.target[part])
        for name, part in (("train", train), ("test", test))
    }


def canvases(digits: list[Tensor], labels: np.ndarray, n: int, rng: np.random.Generator):
    """Images ``[n, 1, SIZE, SIZE]``; of each, labels and boxes ``[m, 4]`` in cells of the finest features."""
    images = torch.zeros(n, 1, SIZE, SIZE)
    targets = []
    for canvas in images[:, 0]:
        free = np.ones((SIZE, SIZE), dtype=bool)
        found, boxes = [], []
        for _ in range(rng.integers(1, MOST, endpoint=True)):
            i = rng.integers(len(digits))
            scale = rng.uniform(1, 2.5)
            h, w = (max(3, round(scale * side)) for side in digits[i].shape)
            y, x = rng.integers(0, SIZE - h, endpoint=True), rng.integers(0, SIZE - w, endpoint=True)
            if free[y : y + h, x : x + w].all():
                free[y : y + h, x : x + w] = False
                digit = F.interpolate(digits[i][None, None], size=(h, w), mode="bilinear")
                canvas[y : y + h, x : x + w] = digit[0, 0]
                found.append(labels[i])
                boxes.append([y + h / 2, x + w / 2, h, w])
        targets.append((torch.tensor(np.array(found)), torch.tensor(boxes, dtype=torch.float32) / STRIDE))
    noise = torch.tensor(rng.normal(0, 0.1, images.shape), dtype=torch.float32)
    return images + noise, targets


def iou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union of boxes ``[..., 4]``, and generalized IoU (arXiv:1902.09630)."""
    low_a, high_a = a[..., :2] - a[..., 2:] / 2, a[..., :2] + a[..., 2:] / 2
    low_b, high_b = b[..., :2] - b[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2
    inner = (torch.minimum(high_a, high_b) - torch.maximum(low_a, low_b)).clamp(min=0).prod(-1)
    hull = (torch.maximum(high_a, high_b) - torch.minimum(low_a, low_b)).prod(-1)
    union = a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - inner
    return inner / union, inner / union - (hull - union) / hull


@torch.no_grad()
def match(logits: Tensor, boxes: Tensor, targets: list) -> tuple[Tensor, Tensor]:
    """Image and query of each object, in the order of the targets: the assignment of least cost."""
    labels, wanted = (torch.cat(parts) for parts in zip(*targets, strict=True))
    distance = torch.cdist(boxes, wanted, p=1) / 4
    costs = distance - 2 * iou(boxes[..., None, :], wanted)[1] - 2 * logits.sigmoid()[..., labels]
    counts = [len(labels) for labels, _ in targets]
    # Transposed, so that the objects are in order.
    pairs = [linear_sum_assignment(cost[i].T) for i, cost in enumerate(costs.split(counts, dim=-1))]
    image = torch.arange(len(targets)).repeat_interleave(torch.tensor(counts))
    return image, torch.cat([torch.as_tensor(query) for _, query in pairs])


def loss_of(outputs: list[tuple[Tensor, Tensor]], targets: list) -> Tensor:
    labels, wanted = (torch.cat(parts) for parts in zip(*targets, strict=True))
    total = torch.zeros(())
    for logits, boxes in outputs:
        at = match(logits, boxes, targets)
        truth = torch.zeros_like(logits)
        truth[(*at, labels)] = 1
        wrong = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
        focal = (wrong * (truth - logits.sigmoid()).square()).sum()
        near = (boxes[at] - wanted).abs().sum() / 4 + 2 * (1 - iou(boxes[at], wanted)[1]).sum()
        total = total + (2 * focal + near) / len(labels)
    return total


def train(model: DETR, split: tuple, steps: int, seed: int, bar: tqdm) -> None:
    batch, rate = 16, 2e-3
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    rng = np.random.default_rng(seed)
    for step in range(steps):
        images, targets = canvases(*split, batch, rng)
        loss = loss_of(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.update()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.2f}")


@torch.inference_mode()
def detect(model: DETR, images: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each image, score, label and box of every query."""
    detections = []
    for part in images.split(100):
        logits, boxes = model(part)[-1]
        scores, labels = logits.sigmoid().max(-1)
        detections += zip(scores, labels, boxes, strict=True)
    return detections


def mean_average_precision(detections: list, targets: list) -> tuple[float, float]:
    """As COCO defines it: mean over classes and IoU thresholds 0.5, 0.55, ..., 0.95; and for 0.5 alone.

    Per class and threshold, detections of all images take, in order of their scores, the free object of most
    overlap; average precision is the mean, at 101 recalls, of the best precision at this recall or more.
    """
    thresholds = np.arange(0.5, 0.96, 0.05)
    results = []
    for label in range(CLASSES):
        objects = sum(int((labels == label).sum()) for labels, _ in targets)
        if objects == 0:
            continue
        found = []  # (score, per threshold whether it is right)
        for (scores, guesses, boxes), (labels, wanted) in zip(detections, targets, strict=True):
            mine = (guesses == label).nonzero()[:, 0]
            mine = mine[scores[mine].argsort(descending=True)]
            overlaps = iou(boxes[mine][:, None], wanted[labels == label])[0].numpy()
            free = np.ones((len(thresholds), overlaps.shape[1]), dtype=bool)
            for score, overlap in zip(scores[mine].tolist(), overlaps, strict=True):
                right = np.zeros(len(thresholds), dtype=bool)
                if len(overlap):
                    possible = np.where(free, overlap, -1)
                    best = possible.argmax(1)
                    right = possible.max(1) >= thresholds
                    free[right, best[right]] = False
                found.append((score, right))
        found.sort(key=lambda pair: -pair[0])
        hits = np.array([right for _, right in found]).reshape(-1, len(thresholds)).cumsum(0)
        precision = hits / np.arange(1, len(hits) + 1)[:, None]
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        for column, recall in zip(precision.T, hits.T / objects, strict=True):
            at = np.searchsorted(recall, np.linspace(0, 1, 101))
            results.append(np.append(column, 0)[at].mean())
    table = np.reshape(results, (-1, len(thresholds)))
    return 100 * table.mean(), 100 * table[:, 0].mean()


def plot(models: dict[str, DETR], images: Tensor, targets: list, path: str) -> None:
    """Detections on a few images; dots show how the reference points moved."""
    fig, axes = plt.subplots(
        len(models), len(images), figsize=(2.5 * len(images), 2.7 * len(models)), squeeze=False
    )
    for (kind, model), row in zip(models.items(), axes, strict=True):
        row[0].set_ylabel(kind)
        with torch.inference_mode():
            outputs = model(images)
        starts = model.points.detach()[:, :2]
        for i, ax in enumerate(row):
            ax.imshow(images[i, 0].numpy(), cmap="gray_r", extent=(0, SIZE, SIZE, 0))
            ax.set(xticks=[], yticks=[], xlim=(0, SIZE), ylim=(SIZE, 0))
            scores, labels = outputs[-1][0][i].sigmoid().max(-1)
            for query in (scores > 0.4).nonzero()[:, 0].tolist():
                path_ = STRIDE * torch.stack([starts[query], *(boxes[i, query, :2] for _, boxes in outputs)])
                y, x, h, w = (STRIDE * outputs[-1][1][i, query]).tolist()
                color = f"C{labels[query]}"
                ax.plot(path_[:, 1], path_[:, 0], ".-", color=color, lw=1, ms=3)
                ax.add_patch(plt.Rectangle((x - w / 2, y - h / 2), w, h, fill=False, color=color))
                ax.text(
                    x - w / 2, y - h / 2 - 1, f"{labels[query]}: {scores[query]:.2f}", color=color, size=7
                )
    fig.savefig(path, dpi=90, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--kinds", nargs="+", default=["rope", "sine-cosine"], choices=["rope", "sine-cosine"]
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first model (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="models of each kind (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="of training (default: %(default)s)")
    parser.add_argument("--output", default="detr.png", help="the picture (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="few steps and images: does it run?")
    args = parser.parse_args()
    steps, tests = (3, 20) if args.tiny else (args.steps, 500)
    torch.set_num_threads(1)
    start = time.perf_counter()
    splits = load_splits()
    images, targets = canvases(*splits["test"], tests, np.random.default_rng(0))
    models, lines = {}, []
    seeds = range(args.seed, args.seed + args.seeds)
    with tqdm(total=len(args.kinds) * len(seeds) * steps, unit="step") as bar:
        for seed in seeds:
            for kind in args.kinds:
                bar.set_description(f"{kind}, seed {seed}")
                torch.manual_seed(seed)
                models[kind] = DETR(kind)
                train(models[kind], splits["train"], steps, seed, bar)
                both = mean_average_precision(detect(models[kind], images), targets)
                lines.append(f"{kind:<12}{seed:>5}" + "".join(f"{value:>12.1f}" for value in both))
    print(f"{'positions':<12}{'seed':>5}{'mAP, %':>12}{'AP at 0.5':>12}", *lines, sep="\n")
    plot(models, images[:6], targets[:6], args.output)
    print(f"{args.output} written; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
