"""The start of PoPE in place of RoPE: two polar channels for each pair of RoPE's channels, fitted to RoPE's scores.

At a distance d, RoPE's score of a pair of channels with the frequency w is

    (q1 k1 + q2 k2) cos(w d) + (q1 k2 - q2 k1) sin(w d)

and that of a polar channel of this frequency, with the identity as magnitude, is a(q) b(k) cos(w d - delta). Here a
and b are linear: a belongs to a query head, b to a key head, delta to a query head. Both scores are tensors X of
2 x 2 x 2 numbers, sum over i, j, m of X[i, j, m] q_i k_j (cos(w d), sin(w d))_m. RoPE's has rank 3, two channels have
rank 2. They are fitted by least squares.

The error of a score changes the attention of a row by its variance under the weights of the row: half of it is the
divergence of the two attentions (to second order). This variance, averaged over the rows of a text, is a quadratic form
of the error of X, the `metric`. A text has only some distances, so the form of independent queries and keys at
distances up to the trained length is added with the factor 0.03.

No approximation of rank 2 is the best one (de Silva and Lim 2008, math/0607647): channels with ever larger scores,
which cancel, come ever nearer. A ridge on the squares of their scores limits them.

Axes: H query heads, G key heads, n = H / G, T tokens, D head dim, P pairs of RoPE, C = 2 channels of a pair, S starts.
"""

import dataclasses
import math
from typing import Any

import torch

from whatwhere.position_base import head_dim

from ..processes import is_first_process
from ..progress import Progress
from .layer_start import SKIPPED, LayerStart, attention_of, norm_weights, observe, rotated_channels

# Share of the form of independent queries and keys in the metric.
_INDEPENDENT = 0.03
# Factor of the ridge.
_RIDGE = 1e-4
# Steps of Adam and their size; after a quarter of them only the best of the starts goes on, and the last quarter has
# smaller steps.
_STEPS, _SIZE, _STARTS = 200, 0.05, 8
# Share of the trace that is added to the diagonal of second moments: another text has what this one has not.
_FLOOR = 1e-3


def rope_tensor() -> torch.Tensor:
    """Returns X of RoPE's score of a pair: float64 (2, 2, 2)."""
    tensor = torch.zeros(2, 2, 2, dtype=torch.float64)
    tensor[0, 0, 0] = tensor[1, 1, 0] = tensor[0, 1, 1] = 1
    tensor[1, 0, 1] = -1
    return tensor


@dataclasses.dataclass
class Fit:
    """Two channels for each pair, float64.

    Attributes:
        query: a, (H, P, C, 2).
        key: b, (G, P, C, 2), of the size of the pair.
        delta: (H, P, C), in radians.
        error: the share of the variance of RoPE's scores, by the metric, that is lost in all pairs of a layer.
    """

    query: torch.Tensor
    key: torch.Tensor
    delta: torch.Tensor
    error: float


class Scores:
    """What a layer's RoPE does on a text: the metric, and second moments of queries and keys.

    Attributes:
        metric: float64 (H, P, 8, 8).
        query: float64 (H, P, 2, 2).
        key: float64 (G, P, 2, 2).
        rows: the number of rows that were added.
    """

    def __init__(self, frequencies: torch.Tensor, scaling: float) -> None:
        self.frequencies, self.scaling = frequencies, scaling
        self.metric = self.query = self.key = torch.zeros((), dtype=torch.float64)
        self.rows = 0

    def add(
        self, query: torch.Tensor, key: torch.Tensor, rotated_query: torch.Tensor, rotated_key: torch.Tensor
    ) -> None:
        """Adds a text: queries (1, H, T, D) and keys (1, G, T, D) before and after RoPE."""
        skipped = min(SKIPPED, query.shape[2] - 1)
        pairs = len(self.frequencies)
        angles = torch.arange(query.shape[2], device=query.device)[:, None] * self.frequencies.to(query.device)
        turns = torch.stack((angles.cos(), angles.sin()), -1).float()
        queries, keys = (_pairs(one[0].float(), pairs) for one in (query, key))
        self.query = self.query + _moments(queries[:, skipped:])
        self.key = self.key + _moments(keys[:, skipped:])
        n = len(queries) // len(keys)
        visible = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril_()[skipped:]
        metric = []
        for head, own in enumerate(queries):
            if head % n == 0:
                features = _key_features(keys[head // n], turns)
                rotated = rotated_key[0, head // n].float()
            logits = rotated_query[0, head, skipped:].float() @ rotated.T * self.scaling
            weights = logits.masked_fill_(~visible, -math.inf).softmax(-1)
            metric.append(_variance(own[skipped:], turns[skipped:], weights @ features))
        self.metric = self.metric + torch.stack(metric)
        self.rows += query.shape[2] - skipped


def _pairs(states: torch.Tensor, pairs: int) -> torch.Tensor:
    """Returns the pairs of channels (heads, T, P, 2) of states (heads, T, D)."""
    return torch.stack((states[..., :pairs], states[..., pairs : 2 * pairs]), -1)


def _moments(pairs: torch.Tensor) -> torch.Tensor:
    return torch.einsum("htpi,htpj->hpij", pairs, pairs).double().cpu()


def _key_features(keys: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Returns, for keys (T, P, 2), k_j u_l and their products, (T, P * 14); u = (cos, sin) of the key's phase."""
    first = (keys[..., :, None] * turns[..., None, :]).flatten(-2)
    # A constant does not change the variances, and this one keeps their digits.
    first = first - first.mean(0)
    rows, columns = torch.triu_indices(4, 4)
    return torch.cat((first.flatten(1), (first[..., rows] * first[..., columns]).flatten(1)), 1)


def _variance(queries: torch.Tensor, turns: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Returns the sum over rows of the covariance of the scores' 8 terms under attention, float64 (P, 8, 8).

    queries and turns: (T, P, 2). means: of `_key_features` under the weights of the rows, (T, P * 14).
    """
    T, P = queries.shape[:2]
    first, second = means[:, : 4 * P].view(T, P, 4), means[:, 4 * P :].view(T, P, 10)
    rows, columns = torch.triu_indices(4, 4)
    covariance = first.new_empty(T, P, 4, 4)
    covariance[..., rows, columns] = covariance[..., columns, rows] = second
    covariance -= first[..., :, None] * first[..., None, :]
    # (cos, sin) of the phase of a distance, from that of the row and that of the key.
    cos, sin = turns.unbind(-1)
    turn = torch.stack((cos, sin, sin, -cos), -1).view(T, P, 2, 2)
    covariance = torch.einsum("tpml,tpjlJL,tpML->tpjmJM", turn, covariance.view(T, P, 2, 2, 2, 2), turn)
    products = (queries[..., :, None] * queries[..., None, :]).view(T, P, 4)
    total = torch.einsum("tpx,tpy->pxy", products, covariance.reshape(T, P, 16)).double().cpu()
    return total.view(P, 2, 2, 4, 4).permute(0, 1, 3, 2, 4).reshape(P, 8, 8)


def _phase_moments(frequencies: torch.Tensor, length: int) -> torch.Tensor:
    """Returns second moments of (cos, sin) over distances up to a length, uniform in their logarithm: (P, 2, 2)."""
    distances = torch.exp(torch.linspace(0, math.log(length), 4096, dtype=torch.float64))
    phases = distances[:, None] * frequencies
    turns = torch.stack((phases.cos(), phases.sin()), -1)
    return torch.einsum("dpi,dpj->pij", turns, turns) / len(distances)


def _with_floor(moments: torch.Tensor) -> torch.Tensor:
    """Returns second moments (..., 2, 2) that can be inverted."""
    trace = moments.diagonal(dim1=-1, dim2=-2).sum(-1)[..., None, None]
    return moments + (_FLOOR * trace + 1e-30) * torch.eye(2, dtype=moments.dtype)


def _unit(angles: torch.Tensor) -> torch.Tensor:
    return torch.stack((angles.cos(), angles.sin()), -1)


def fit(
    scores: Scores,
    length: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    use_delta: bool = True,
) -> Fit:
    """Fits two channels to each pair.

    Args:
        scores: of a layer.
        length: the trained length.
        norms: the weights of `qk_norm` for the pairs of queries (H, P, 2) and keys (G, P, 2). The two channels of a
            pair are then perpendicular before them, since a norm measures all channels.
        use_delta: False: delta is 0.
    """
    G, P = scores.key.shape[:2]
    n = len(scores.query) // G
    second_query = _with_floor(scores.query.view(G, n, P, 2, 2) / scores.rows)
    second_key = _with_floor(scores.key / scores.rows)
    second_phase = _with_floor(_phase_moments(scores.frequencies, length))
    metric = torch.einsum("gnpia,gpjb,pmc->gnpijmabc", second_query, second_key, second_phase).reshape(G, n, P, 8, 8)
    metric = scores.metric.view(G, n, P, 8, 8) / scores.rows + _INDEPENDENT * metric
    target = rope_tensor().flatten()
    size = torch.einsum("gnpxy,x,y->gnp", metric, target, target)
    floor = 1e-6 * size.mean() + torch.finfo(torch.float64).tiny
    # Directions are angles of unit vectors in coordinates in which the second moments are 1.
    key_root, phase_root = (torch.linalg.inv(torch.linalg.cholesky(one).mT) for one in (second_key, second_phase))
    bases = None
    if norms is not None:
        # Perpendicular directions before the norms' weights.
        bases = tuple(1 / _nonzero(one) for one in (norms[0].view(G, n, P, 2), norms[1]))
    problem = _Problem(metric / (size + floor)[..., None, None], key_root, phase_root, bases, use_delta)
    angles = problem.solve()
    with torch.no_grad():
        query, key, phase = problem.channels(*angles)[:3]
    query, key, phase = query[0], key[0], phase[0]
    delta = torch.atan2(phase[..., 1], phase[..., 0])
    query = query * phase.norm(dim=-1)[..., None]
    tensor = torch.einsum("gnpci,gpcj,gnpcm->gnpijm", query, key, _unit(delta)).flatten(-3) - target
    lost = torch.einsum("gnpx,gnpxy,gnpy->", tensor, metric, tensor)
    # Keys get the size of the pair.
    scale = (
        second_key.diagonal(dim1=-1, dim2=-2).mean(-1) / _square(key, second_key).mean(-1).clamp_min(1e-300)
    ).sqrt()
    key, query = key * scale[..., None, None], query / scale[:, None, :, None, None]
    if use_delta:
        # A channel with the opposite sign and a delta of pi more is the same: delta stays away from the bounds 0 and
        # -2 pi.
        flipped = delta.abs() < math.pi / 2
        query = torch.where(flipped[..., None], -query, query)
        delta = torch.where(flipped, delta - math.pi, -torch.remainder(-delta, 2 * math.pi))
    H = G * n
    return Fit(query.reshape(H, P, 2, 2), key, delta.reshape(H, P, 2), (lost / size.sum()).item())


def _nonzero(weights: torch.Tensor) -> torch.Tensor:
    return torch.where(weights.abs() < 1e-6, 1e-6, weights.double())


def _square(directions: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Returns the mean squares of channels with directions (..., C, 2), for second moments (..., 2, 2)."""
    return torch.einsum("...ci,...ij,...cj->...c", directions, moments, directions)


class _Problem:
    """Least squares over angles: the factors that enter linearly are solved for.

    Without norms the angles are those of the keys' directions and of the phases, and a is solved for. With norms there
    is an angle of the frame of each head of queries and keys, and only the sizes of the channels are solved for.
    """

    def __init__(
        self,
        metric: torch.Tensor,
        key_root: torch.Tensor,
        phase_root: torch.Tensor,
        bases: tuple[torch.Tensor, ...] | None,
        use_delta: bool,
    ) -> None:
        G, n, P = metric.shape[:3]
        self.shape = G, n, P
        target = rope_tensor().flatten()
        self.metric = metric.view(G, n, P, 2, 4, 2, 4)
        self.product = torch.einsum("gnpxy,y->gnpx", metric, target).view(G, n, P, 2, 4)
        self.size = torch.einsum("gnpxy,x,y->gnp", metric, target, target)
        self.key_root, self.phase_root, self.bases, self.use_delta = key_root, phase_root, bases, use_delta

    def _starts(self) -> list[torch.Tensor]:
        """Returns random angles, float64: (S, G, P, C or 1), (S, G, n, P, C), and with norms (S, G, n, P, 1)."""
        G, n, P = self.shape
        generator = torch.Generator().manual_seed(0)
        shapes = [(G, P, 2), (G, n, P, 2)] if self.bases is None else [(G, P, 1), (G, n, P, 2), (G, n, P, 1)]
        return [math.pi * torch.rand(_STARTS, *shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def channels(self, key: torch.Tensor, phase: torch.Tensor, *query: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the channels that angles give, with the best sizes: a, b, delta, and their errors.

        The shapes are (S, G, n, P, C, 2), (S, G, P, C, 2), (S, G, n, P, C, 2), the cosine and sine of delta times a
        size, and (S, G, n, P). For the angles see `_starts`.
        """
        phases = torch.einsum("pmM,sgnpcM->sgnpcm", self.phase_root, _unit(phase))
        if not self.use_delta:
            phases = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(phases.shape)
        quarter = torch.tensor([0.0, math.pi / 2], dtype=torch.float64)
        if self.bases is None:
            keys = torch.einsum("gpjJ,sgpcJ->sgpcj", self.key_root, _unit(key))
        else:
            keys = _unit(key + quarter) * self.bases[1][..., None, :]
            queries = _unit(query[0] + quarter) * self.bases[0][..., None, :]
        both = (keys[:, :, None, ..., :, None] * phases[..., None, :]).flatten(-2)
        normal = torch.einsum("sgnpcx,gnpixIX,sgnpCX->sgnpciCI", both, self.metric, both)
        right = torch.einsum("sgnpcx,gnpix->sgnpci", both, self.product)
        if self.bases is None:
            normal, right = normal.flatten(-4, -3).flatten(-2), right.flatten(-2)
            same = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).double()
        else:
            normal = torch.einsum("sgnpci,sgnpciCI,sgnpCI->sgnpcC", queries, normal, queries)
            right = (queries * right).sum(-1)
            same = torch.eye(2)
        trace = normal.diagonal(dim1=-1, dim2=-2).sum(-1)[..., None, None]
        ridge = _RIDGE * normal * same + (1e-9 * trace + 1e-30) * torch.eye(normal.shape[-1])
        solved = torch.linalg.solve(normal + ridge, right)
        error = self.size - (right * solved).sum(-1)
        factors = solved.unflatten(-1, (2, 2)) if self.bases is None else solved[..., None] * queries
        return factors, keys, phases, error

    @torch.enable_grad()
    def solve(self) -> list[torch.Tensor]:
        """Returns the angles of one start, as in `_starts`."""
        angles = [one.requires_grad_() for one in self._starts()]
        optimizer = torch.optim.Adam(angles, lr=_SIZE)
        for step in range(_STEPS):
            if step == _STEPS // 4:
                with torch.no_grad():
                    best = self.channels(*angles)[-1].sum(2).argmin(0)
                    angles = [_chosen(one, best).requires_grad_() for one in angles]
                optimizer = torch.optim.Adam(angles, lr=_SIZE)
            if step == _STEPS * 3 // 4:
                optimizer.param_groups[0]["lr"] = _SIZE / 5
            optimizer.zero_grad()
            self.channels(*angles)[-1].sum().backward()
            optimizer.step()
        return [one.detach() for one in angles]


def _chosen(angles: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Returns the angles (1, ...) of the start `best` (G, P) for each key head and pair."""
    index = best[None, ..., None] if angles.ndim == 4 else best[None, :, None, :, None]
    return torch.gather(angles, 0, index.expand(1, *angles.shape[1:])).clone()


def fitted_starts(
    model: Any,
    tokens: torch.Tensor,
    layers: list[int],
    frequencies: torch.Tensor,
    length: int,
    *,
    factors: tuple[float, float],
    use_delta: bool,
) -> tuple[dict[int, LayerStart], dict[int, float]]:
    """Returns the starts of layers, and the errors of their fits, see `Fit`.

    The polar channels of a head come first, two for each pair, then its other channels as they were.

    Args:
        model: with RoPE in these layers.
        tokens: ids of texts of one length, int64 (texts, T).
        layers: their indices.
        frequencies: of the pairs that become polar, which are the first ones, float64, radians per token.
        length: the trained length, in tokens.
        factors: of the scores of polar channels, and of the others.
        use_delta: False: delta is 0.
    """
    width, pairs = head_dim(model.config), rotated_channels(model.config) // 2
    fitted = len(frequencies)
    scores = {index: Scores(frequencies, attention_of(model, index).scaling) for index in layers}
    observe(model, tokens, {index: one.add for index, one in scores.items()}, "scores of RoPE")
    starts, errors = {}, {}
    with Progress("fit of PoPE", len(layers), unit="layers", shown=is_first_process()) as progress:
        for index in layers:
            norms = norm_weights(model, index)
            parts = None
            if norms is not None:
                query, key = (_pairs(one[:, None], pairs)[:, 0, :fitted] for one in norms)
                parts = query, key
            found = fit(scores.pop(index), length, parts, use_delta=use_delta)
            directions, sizes, plain = [found.query * factors[0], found.key], [], [factors[1], 1.0]
            if norms is not None and parts is not None:
                turned = [_before_norm(one, part) for one, part in zip(directions, parts)]
                others = [*range(fitted, pairs), *range(pairs + fitted, width)]
                for (_, size), weights, factor in zip(turned, norms, plain):
                    sizes.append(torch.cat((size.flatten(1), weights[:, others] * factor), 1))
                directions, plain = [frame for frame, _ in turned], [1.0, 1.0]
            query, key = (_matrices(one, pairs, width, factor) for one, factor in zip(directions, plain))
            start = LayerStart(query, key, found.delta.flatten(1), *sizes)
            starts[index], errors[index] = start, found.error
            progress.advance()
    return starts, errors


def exact_starts(model: Any, layers: list[int], factors: tuple[float, float]) -> dict[int, LayerStart]:
    """Returns the starts of layers with three polar channels for each pair, which have exactly its score.

    With |q|, |k| and the angles x, y of the pair of a query and a key, RoPE's score is |q| |k| cos(w d + x - y). The
    channels have |q| |k| cos(x - t) cos(y + t) cos(w d - t) for t = 0, 2 pi / 3 and 4 pi / 3. A quarter of each is
    RoPE's score, and the rest are cosines with the phases -t, -t and t, whose sums over t are zero.

    Heads have D + P channels. For the arguments see `fitted_starts`.
    """
    config = model.config
    width, pairs = head_dim(config), rotated_channels(config) // 2
    turns = torch.arange(3, dtype=torch.float64) * (2 * math.pi / 3)
    starts = {}
    for index in layers:
        query = (_unit(turns) * (factors[0] * 4 / 3)).expand(config.num_attention_heads, pairs, 3, 2)
        key = _unit(-turns).expand(config.num_key_value_heads, pairs, 3, 2)
        # Away from the bounds 0 and -2 pi of delta, where its gradient changes its sign.
        delta = (turns - 2 * math.pi).repeat(config.num_attention_heads, pairs)
        delta[:, ::3] = -math.pi
        query = torch.cat((-query[:, :, :1], query[:, :, 1:]), 2)
        starts[index] = LayerStart(_matrices(query, pairs, width, factors[1]), _matrices(key, pairs, width), delta)
    return starts


def _matrices(directions: torch.Tensor, pairs: int, width: int, plain: float = 1.0) -> torch.Tensor:
    """Returns the matrices of heads (heads, D', D) for the directions of their first pairs (heads, pairs, C, 2).

    plain: the factor of the other channels.
    """
    heads, fitted, channels = directions.shape[:3]
    polar = channels * fitted
    others = [*range(fitted, pairs), *range(pairs + fitted, width)]
    matrices = torch.zeros(heads, polar + len(others), width, dtype=torch.float64)
    for channel in range(channels):
        rows = torch.arange(channel, polar, channels)
        for part in range(2):
            matrices[:, rows, torch.arange(fitted) + part * pairs] = directions[:, :, channel, part]
    matrices[:, range(polar, polar + len(others)), others] = plain
    return matrices


def _before_norm(directions: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns perpendicular directions of length 1 (heads, pairs, C, 2), and the channels' sizes (heads, pairs, C).

    directions: of what the norm with `weights` (heads, pairs, 2) returns.
    """
    turned = directions * weights[..., None, :]
    # The longer one has the more exact direction.
    first = (turned[:, :, 0].norm(dim=-1) >= turned[:, :, 1].norm(dim=-1))[..., None]
    along = torch.nn.functional.normalize(torch.where(first, turned[:, :, 0], turned[:, :, 1]), dim=-1)
    across = torch.stack((-along[..., 1], along[..., 0]), -1)
    frame = torch.stack((torch.where(first, along, across), torch.where(first, across, along)), -2)
    return frame, (turned * frame).sum(-1)
