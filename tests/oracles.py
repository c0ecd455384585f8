"""Position encodings as the papers print them: Python loops in float64, one head, no tricks. For tests only.

Axes: Q query length, K key length, D head dim, V value width, P positions in a table.
"""

import math

import torch

# Softmax attention with a position term; CoPE and its relatives, relative positions, ALiBi.


def attention_oracle(query, key, value, visible, scaling, term):
    """One head, row by row and key by key.

    Args:
        query: (Q, D). key: (K, D). value: (K, V). All float64.
        visible: bool (Q, K).
        scaling: the factor on q.k.
        term: `(i, logits) -> list`, what is added to the logits of row i; `logits[j]` is None where masked.

    Returns:
        (Q, V); 0 in rows that see nothing.
    """
    rows = []
    for i in range(query.shape[0]):
        seen = [j for j in range(key.shape[0]) if visible[i, j]]
        if not seen:
            rows.append(torch.zeros_like(value[0]))
            continue
        logits = [torch.dot(query[i], key[j]) * scaling if visible[i, j] else None for j in range(key.shape[0])]
        added = term(i, logits)
        exponentials = {j: torch.exp(logits[j] + added[j]) for j in seen}
        total = sum(exponentials.values())
        rows.append(sum(exponentials[j] / total * value[j] for j in seen))
    return torch.stack(rows)


def contextual_positions(logits, last=math.inf):
    """CoPE's Eq. 3 and 4 for one row: p_ij of every key, at most `last`, from the gates' logits; None where masked."""
    gates = [torch.zeros((), dtype=torch.float64) if s is None else 1 / (1 + torch.exp(-s)) for s in logits]
    sums = [sum(gates[j:], torch.zeros((), dtype=torch.float64)) for j in range(len(gates))]
    return [torch.full((), float(last), dtype=torch.float64) if p > last else p for p in sums]


def contextual_positions_of_all(gates, last=math.inf):
    """The same of all rows at once, as the paper's Listing 1 does it: gates (..., K), 0 where masked."""
    return gates.flip(-1).cumsum(-1).flip(-1).clamp(max=last)


def cope_oracle(
    query,
    key,
    value,
    table,
    visible,
    scaling,
    scale_positions=False,
    gate_key=None,
    plus=None,
    position_query=None,
    gate_query=None,
):
    """CoPE, Eq. 3 to 9 of arXiv 2405.18719, one head; `table` (D, P) holds e[p] in its columns.

    `gate_key` (K, D): what opens the gates in place of the keys. `plus(i, j)`: what another encoding adds to the logit.
    `position_query` (Q, D): what is multiplied with the table in place of the query; `gate_query`: with `gate_key`.
    """
    last = table.shape[1] - 1
    position_query = query if position_query is None else position_query
    gate_query = query if gate_query is None else gate_query

    def term(i, logits):
        opening = logits
        if gate_key is not None:
            opening = [None if s is None else torch.dot(gate_query[i], x) * scaling for s, x in zip(logits, gate_key)]
        added = []
        for j, position in enumerate(contextual_positions(opening, last)):
            floor, ceil = math.floor(position.item()), math.ceil(position.item())
            fraction = position - floor
            z_floor, z_ceil = (torch.dot(position_query[i], table[:, level]) for level in (floor, ceil))
            z = (fraction * z_ceil + (1 - fraction) * z_floor) * (scaling if scale_positions else 1.0)
            added.append(z if plus is None else z + plus(i, j))
        return added

    return attention_oracle(query, key, value, visible, scaling, term)


def cope_alibi_oracle(query, key, value, slope, visible, scaling):
    """CoPE_ALiBi, Eq. 10 of arXiv 2405.18719, one head with the given slope."""

    def term(i, logits):
        return [slope * position for position in contextual_positions(logits)]

    return attention_oracle(query, key, value, visible, scaling, term)


def cope_mlp_oracle(query, key, value, weight, bias, output, visible, scaling, last):
    """CoPE_MLP, one head: e(p) = output relu(weight p / last + bias) in Eq. 6; weight, bias (N,), output (D, N)."""

    def term(i, logits):
        added = []
        for position in contextual_positions(logits, last):
            embedding = torch.zeros_like(query[i])
            for n in range(weight.shape[0]):
                unit = weight[n] * (position / last) + bias[n]
                if unit > 0:
                    embedding = embedding + output[:, n] * unit
            added.append(torch.dot(query[i], embedding) * scaling)
        return added

    return attention_oracle(query, key, value, visible, scaling, term)


def relative_oracle(query, key, value, table, query_positions, key_positions, visible, scaling, beyond):
    """Relative positions on the keys, Eq. 3 and 4 of arXiv 1803.02155 without the value part; `table` is (P, D)."""

    def term(i, logits):
        added = []
        for j in range(len(logits)):
            distance = int(query_positions[i]) - int(key_positions[j])
            if distance < 0:
                added.append(None)
            elif distance < table.shape[0]:
                added.append(torch.dot(query[i], table[distance]) * scaling)
            elif beyond == "last":
                added.append(torch.dot(query[i], table[-1]) * scaling)
            else:
                added.append(torch.zeros((), dtype=query.dtype))
        return added

    return attention_oracle(query, key, value, visible, scaling, term)


def rope_rotation(features, position, theta, rotated):
    """RoPE, Eq. 15 of arXiv 2104.09864, of one token's features (D,), in the layout of Transformers' Llama.

    Of the first `rotated` channels, channel c and channel c + rotated / 2 are one plane; the others stay.
    """
    turned = features.clone()
    half = rotated // 2
    for c in range(half):
        angle = float(position) * theta ** (-2 * c / rotated)
        x, y = features[c], features[half + c]
        turned[c] = x * math.cos(angle) - y * math.sin(angle)
        turned[half + c] = y * math.cos(angle) + x * math.sin(angle)
    return turned


def alibi_oracle(query, key, value, slope, query_positions, key_positions, visible, scaling):
    """ALiBi, Section 3 of arXiv 2108.12409, one head with the given slope."""

    def term(i, logits):
        return [-slope * (int(query_positions[i]) - int(key_positions[j])) for j in range(len(logits))]

    return attention_oracle(query, key, value, visible, scaling, term)


def visible_oracle(query_length, key_length, segments=None):
    """bool (Q, K): row i has slot K - Q + i; it sees older slots and its own, of its own segment, if that is not -1."""
    visible = torch.zeros(query_length, key_length, dtype=torch.bool)
    for i in range(query_length):
        slot = key_length - query_length + i
        for j in range(slot + 1):
            same = segments is None or (segments[slot] >= 0 and segments[j] == segments[slot])
            visible[i, j] = bool(same)
    return visible


def pope_attention(query, key, value, delta, parameters, positions):
    """PoPE, equations 3 to 5, one logit at a time.

    Args:
        query: float64 (B, H, T, D). key, value: float64 (B, G, T, D).
        delta: (H, R), or None.
        parameters: `PoPEParameters`.
        positions: int64 (T,).

    Returns:
        float64 (B, H, T, D).
    """
    B, H, T, D = query.shape
    R = int(D * parameters.partial_rotary_factor)
    magnitude = {
        "softplus": lambda x: torch.log(1 + torch.exp(x)),
        "relu": lambda x: torch.clamp(x, min=0),
        "identity": lambda x: x,
    }[parameters.magnitude]
    rows = []
    for b in range(B):
        for h in range(H):
            g = h // (H // key.shape[1])
            for t in range(T):
                logits = []
                for s in range(t + 1):
                    logit = query.new_zeros(())
                    for c in range(R):
                        theta = parameters.frequencies[c] if parameters.frequencies else parameters.theta ** (-c / R)
                        phase = torch.as_tensor(float(positions[s] - positions[t]) * theta, dtype=torch.float64)
                        if delta is not None:
                            phase = phase + delta[h, c]
                        logit = logit + magnitude(query[b, h, t, c]) * magnitude(key[b, g, s, c]) * torch.cos(phase)
                    logit = logit + (query[b, h, t, R:] * key[b, g, s, R:]).sum()
                    logits.append(logit / math.sqrt(2 * D if parameters.scale == "1/sqrt(2d)" else D))
                weights = torch.softmax(torch.stack(logits), dim=0)
                rows.append(weights @ value[b, g, : t + 1])
    return torch.stack(rows).view(B, H, T, D)


def stick_breaking_oracle(query, key, value, visible, own, scaling, inclusive=False, rest=None):
    """Stick-breaking attention as arXiv 2410.17980 defines it, one head, by products instead of sums of logarithms.

    Args:
        query: (Q, D). key: (K, D). value: (K, V). All float64.
        visible: bool (Q, K).
        own: the slot of each row's own token, which only `inclusive` lets it see; None for a row that sees nothing.
        scaling: the factor on q.k.
        inclusive: j <= i instead of j < i.
        rest: (Q, V), what each row's remainder is multiplied with, or None.

    Returns:
        (Q, V), the weights (Q, K) and the remainders (Q,).
    """
    outputs, weights, remainders = [], [], []
    for i in range(query.shape[0]):
        keys = [j for j in range(key.shape[0]) if visible[i, j] and (inclusive or j != own[i])]
        betas = {j: 1 / (1 + torch.exp(-torch.dot(query[i], key[j]) * scaling)) for j in keys}
        row = []
        for j in range(key.shape[0]):
            weight = betas[j] if j in betas else query.new_zeros(())
            for k in keys:
                if k > j:
                    weight = weight * (1 - betas[k])
            row.append(weight)
        remainder = query.new_ones(()) - sum(row)
        output = sum(weight * value[j] for j, weight in enumerate(row))
        outputs.append(output if rest is None else output + remainder * rest[i])
        weights.append(torch.stack(row))
        remainders.append(remainder)
    return torch.stack(outputs), torch.stack(weights), torch.stack(remainders)


def token_gated_cope_oracle(query, key, value, position_query, gates, table, visible, scaling):
    """Token-gated CoPE as its note prints it, one head; position_query (Q, D) is W_p q; gates (K,), table (P, D)."""
    last = table.shape[0] - 1.001

    def term(i, logits):
        added, count = [], torch.zeros((), dtype=query.dtype)
        for j, logit in enumerate(logits):
            if logit is not None:
                count = count + gates[j]
            position = count if count <= last else torch.full((), last, dtype=query.dtype)
            floor = math.floor(position.item())
            fraction = position - floor
            embedding = (1 - fraction) * table[floor] + fraction * table[floor + 1]
            added.append(torch.dot(position_query[i], embedding) * scaling)
        return added

    return attention_oracle(query, key, value, visible, scaling, term)


def fox_oracle(query, key, value, log_forget, visible, scaling):
    """Forgetting attention, arXiv 2503.02130, one head; log_forget (K,). Row i forgets by what it sees and is newer."""

    def term(i, logits):
        added = []
        for j in range(len(logits)):
            newer = [log_forget[k] for k in range(j + 1, len(logits)) if logits[k] is not None]
            added.append(sum(newer, torch.zeros((), dtype=query.dtype)))
        return added

    return attention_oracle(query, key, value, visible, scaling, term)


def token_shift_oracle(states, gates, segments):
    """FoX (Pro)'s shift of keys or values (K, D), gates (K,), from the token before in the same segment, not -1."""
    rows = []
    for t in range(states.shape[0]):
        before = [s for s in range(t) if segments[s] == segments[t] and segments[t] >= 0]
        previous = states[before[-1]] if before else torch.zeros_like(states[t])
        rows.append(gates[t] * previous + (1 - gates[t]) * states[t])
    return torch.stack(rows)


def rms_norm_oracle(vector, scale, eps=1e-6):
    """RMSNorm of one vector (D,)."""
    square = sum(x * x for x in vector) / vector.shape[0]
    return vector / torch.sqrt(square + eps) * scale
