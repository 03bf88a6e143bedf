"""A plan's memory as a figure: one bar for each device, one colour for each kind of term."""

from __future__ import annotations

from html import escape

from a3b_gguf.planner.plan import Plan
from a3b_gguf.report.plan_bars import parts
from a3b_gguf.units import GIB

WIDTH, LEFT, BAR, GAP, TOP = 900, 90, 34, 46, 64  # pixels
LABEL_LEAST = 46  # a part narrower than this has its size in the legend's tooltip only


def svg(plan: Plan) -> str:
    """An SVG document. Bars have one scale, so that a card and the RAM can be compared."""
    budgets = plan.budgets
    scale = (WIDTH - LEFT - 20) / max(budget.total for budget in budgets)
    height = TOP + len(budgets) * (BAR + GAP) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(20, 26, f"{plan.facts.name}, {plan.load.n_ctx:,} tokens, KV cache {plan.load.kv_type_k}/{plan.load.kv_type_v}", size=16),
        text(20, 46, f"{plan.speed.decode.low:.0f}-{plan.speed.decode.high:.0f} tokens/s expected"),
    ]
    legend: dict[str, str] = {}
    for row, budget in enumerate(budgets):
        y, x = TOP + row * (BAR + GAP), float(LEFT)
        lines.append(text(20, y + BAR / 2 + 5, budget.device))
        for part in parts(plan, budget):
            width = part.n_bytes * scale
            title = f"{part.label}: {part.n_bytes / GIB:.2f} GiB"
            shape = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{part.colour}" stroke="#555555" stroke-width="0.5"'
            lines.append(f"<rect {shape}><title>{escape(title)}</title></rect>")
            if width >= LABEL_LEAST:
                lines.append(text(x + 4, y + BAR / 2 + 5, f"{part.n_bytes / GIB:.1f}", size=11))
            legend[part.label] = part.colour
            x += width
        lines.append(text(LEFT, y + BAR + 17, f"{budget.need / GIB:.2f} of {budget.total / GIB:.2f} GiB, {budget.left / GIB:.2f} GiB left"))
    x = 20.0
    for label, colour in legend.items():
        lines.append(f'<rect x="{x:.0f}" y="{height - 28}" width="12" height="12" fill="{colour}" stroke="#555555" stroke-width="0.5"/>')
        lines.append(text(x + 16, height - 17, label, size=11))
        x += 30 + 6.2 * len(label)
    return "\n".join([*lines, "</svg>", ""])


def text(x: float, y: float, words: str, size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(words)}</text>'
