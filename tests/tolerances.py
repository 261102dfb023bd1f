"""Tolerances of the comparison tests, each with the noise that was observed when it was set."""

# acd: fused loss against dense float64 autograd, random problems up to 123 x 1009.
LOSS_GRADIENT_FP64 = 1e-12  # observed 2e-15
LOSS_GRADIENT_FP32 = 1e-6  # observed 4e-7 at a gradient scale of 3
LOSS_VALUE_FP32 = 1e-6  # relative; observed 7e-8

# miniature: training's own encoder and adapter against loha's, fp32, latents of scale about 1.
MINIATURE_LATENTS = 1e-5  # observed 5e-7

# loha: packed rows, mini-batches and stock attention against one piece at a time, fp32, states of scale about 3.
PACKED_FP32 = 1e-5  # observed 3e-6
