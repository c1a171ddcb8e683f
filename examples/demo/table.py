"""The demo's tables, as text."""

from collections.abc import Sequence

import numpy as np

_TOKENS = 12


def requests_table(lines: Sequence[tuple[str, str, int, int, int, int]]) -> str:
    """One line a request.

    Args:
        lines: endpoint, text, prompt tokens, new tokens, rows, mismatches of each request.
    """
    out = [f"{'endpoint':<22}{'prompt':<34}{'tokens':>12}{'rows':>7}{'mismatches':>12}"]
    for endpoint, text, prompt, new, rows, mismatches in lines:
        shown = text.replace("\n", " ")
        shown = shown if len(shown) <= 32 else shown[:14] + " ... " + shown[-13:]
        out.append(f"{endpoint:<22}{shown:<34}{f'{prompt} + {new}':>12}{rows:>7}{mismatches:>12}")
    return "\n".join(out)


def experts_table(rows: np.ndarray, tokens: Sequence[str], prompt: int) -> str:
    """Who was routed where: the last tokens of the prompt and the first new ones.

    Args:
        rows: int32 [rows, layers, top_k].
        tokens: text of each token.
        prompt: how many of them are the prompt's.
    """
    layers, top_k = rows.shape[1:]
    width = 3 * top_k + 1
    out = ["token".ljust(14) + "".join(f"layer {i}".ljust(width) for i in range(layers))]
    first = max(0, prompt - _TOKENS // 2)
    for i in range(first, min(first + _TOKENS, len(rows))):
        label = f"{i:>4} {tokens[i]!r:<6}{'new' if i >= prompt else '':<3}"
        cells = (" ".join(f"{e:2}" for e in sorted(layer)).ljust(width) for layer in rows[i])
        out.append(label + "".join(cells))
    return "\n".join(line.rstrip() for line in out)


def load_table(rows: np.ndarray, experts: int) -> str:
    """The busiest and the idlest expert of each layer, over rows [rows, layers, top_k]."""
    fair = rows.shape[2] / experts
    out = [f"an even share would be {fair:.1%} of the tokens for each of {experts} experts"]
    for layer in range(rows.shape[1]):
        share = np.bincount(rows[:, layer].ravel(), minlength=experts) / len(rows)
        most, least = int(share.argmax()), int(share.argmin())
        out.append(
            f"layer {layer}: busiest expert {most:2} ({share[most]:5.1%})   "
            f"idlest expert {least:2} ({share[least]:5.1%})"
        )
    return "\n".join(out)
