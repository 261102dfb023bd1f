"""Estimated optimized retail cost: what a provider that prices short contexts by their cost would charge.

Output tokens at a context limit W cost the model's list price times a factor that falls linearly from 1 at the
reference window to r at 16K; uncached input costs a fifth of output, cached input a tenth of uncached input.

Source: "You don't need long context" (arXiv 2611.05306), appendix B, equations 1 to 4. K is 1,024: the costs printed in
its table 3 come out to the cent with 16,384 and with 278,528 for "272 K". (Its table 4 does with limits of 48,000,
32,000 and 24,000 in place of 49,152 and so on, all else equal.)
"""

from __future__ import annotations

from dataclasses import dataclass

SHORT_CONTEXT = 16 * 1024
"""Tokens at which the price is lowest; smaller limits cost the same."""

SHORT_CONTEXT_RATIO = 0.20
"""r: cost at 16K over cost at 256K. The appendix's rounded mean of 0.2772, 0.1777 and 0.1439."""

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PriceList:
    """A model's list prices, in US dollars per million tokens."""

    name: str
    output: float
    reference_window: int
    """Tokens at which the list price is anchored."""

    output_to_input: float = 5.0
    input_to_cached: float = 10.0

    def factor(self, limit: int) -> float:
        """Return the price at a total context limit over the list price (equation 2).

        Args:
            limit: W, tokens; above the reference window the list price holds.
        """
        span = self.reference_window - SHORT_CONTEXT
        over = max(min(limit, self.reference_window), SHORT_CONTEXT) - SHORT_CONTEXT
        return SHORT_CONTEXT_RATIO + (1 - SHORT_CONTEXT_RATIO) * over / span

    def cost(self, *, uncached: float, cached: float, output: float, limit: int | None = None) -> float:
        """Return US dollars (equation 4, nominal cost without a limit).

        Args:
            uncached: I, input tokens that no cache held.
            cached: H, input tokens from a cache.
            output: O, generated tokens.
            limit: W; None gives the nominal retail cost.
        """
        price = self.output * (1.0 if limit is None else self.factor(limit)) / MILLION
        input_price = price / self.output_to_input
        return uncached * input_price + cached * input_price / self.input_to_cached + output * price


OPUS_4_5 = PriceList(name="Claude Opus 4.5", output=25.0, reference_window=200_000)
GPT_5_6_SOL = PriceList(name="GPT 5.6 Sol", output=20.0, reference_window=272 * 1024)
