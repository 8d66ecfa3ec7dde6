"""What DFlash2 adds to the DFlash network, as functions of tensors that serving and training share.

Source: the DFlash authors' reference code (PyPI `dflash` 0.1.0, DFlash2DraftModel). Differentiable in every argument.
"""

import torch
import torch.nn.functional as F


def split_kernels(kernels: torch.Tensor, taps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The dynamic kernels of a sublayer's two convolutions: for the sublayer's input and for its output.

    kernels [..., 2 x taps x groups], kernel_projection of the sublayer's normed input -> two of [..., taps, groups].
    """
    before, after = kernels.reshape(*kernels.shape[:-1], 2, taps, -1).unbind(-3)
    return before, after


def grouped_conv(x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution along the slots of each block, with zeros before slot 0:

        y[t, c] = sum over taps o of (base[o, c] + dynamic[t, o, group of c]) x[t - o, c]

    x [blocks, slots, H], base [taps, H], dynamic [blocks, slots, taps, groups] -> [blocks, slots, H]. A group is H /
    groups channels that lie side by side.
    """
    slots, taps, groups = dynamic.shape[1:]
    grouped = x.reshape(len(x), slots, groups, -1)
    base = base.to(x.dtype).view(taps, groups, -1)
    y = torch.zeros_like(grouped)
    for tap in range(taps):
        shifted = F.pad(grouped, (0, 0, 0, 0, tap, 0))[:, :slots]
        y = torch.addcmul(y, shifted, base[tap])
        y = torch.addcmul(y, shifted, dynamic[:, :, tap, :, None])
    return y.reshape(x.shape)


def transition_scores(predecessors: torch.Tensor, hidden: torch.Tensor, successors: torch.Tensor) -> torch.Tensor:
    """What the candidate selector adds to candidate b's logit where the token before it is a: <A[a] * h, B[b]>.

    predecessors [..., P, r]: rows A[a] of the predecessor codebook; hidden [..., r]: hidden_projection of the slot's
    final hidden state; successors [..., K, r]: rows B[b] of the successor codebook -> [..., P, K].
    """
    return (predecessors * hidden[..., None, :]) @ successors.transpose(-1, -2)
