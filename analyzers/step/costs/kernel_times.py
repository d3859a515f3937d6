"""The time of a kernel on a device: a roofline whose ceilings are the shares of the datasheet that kernels reach.

Three things are computed for each kernel: its arithmetic, its traffic (the bytes that it reads and writes), and what limits a
multiprocessor beside both. "Matrix units" are tensor cores, "float32 units" or "vector" the ordinary ones.

A kernel takes ``start + max(arithmetic, traffic)``, softened where both are alike (Williams et al., "Roofline", CACM 2009).
Arithmetic is a matrix product cut into tiles that fill the multiprocessors in waves (the idea of NeuSight, ASPLOS 2025:
utilisation by tile, bounded by the roofline). Convolutions, attention and recurrent layers are also limited by what their
instructions can feed the units per cycle, which has grown less than the units' rate (products have new ones in every
generation), and clocks by the board's power (:func:`sustained`). Traffic is bytes over bandwidth, less what the last cache
keeps, and over what a multiprocessor can carry per cycle: norms and reductions wait for their own loads, so that a memory of
twice the bandwidth does not make them twice as fast. Which share of each a class of kernels reaches is a constant
(:class:`Constants`), few of them, fitted to published measurements by :mod:`.fitting`. Start at :func:`demand_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.step.costs.kernels import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Kernels
from ddltool.analyzers.step.recording.op_rules import CLASS, CLASSES
from ddltool.arrays import Flags, Floats
from ddltool.calibration import UNITS as UNITS
from ddltool.device import Device

# Rows and columns of the pieces that libraries cut a product into, and the rate of each beside the largest's.
_TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.75), (64, 32, 0.5), (32, 32, 0.35))
# Start and end of the largest tile take so many cycles, of a smaller one by its size; with fewer tiles than multiprocessors the
# inner dimension is split, down to pieces of this length; half of an unfilled last wave is lost (others fill the rest).
_EDGE, _SPLIT, _TAIL = 2000.0, 256.0, 0.5
# The last cache keeps this part of its size of what a kernel's neighbours wrote.
_KEPT = 0.5
# Peaks this many times float32's are those of matrix units, from Volta on.
_MATRIX_UNIT = 1.5
_WITHOUT_MATRIX_UNITS = ("Kepler", "Maxwell", "Pascal")
# The power of the norm that joins a kernel's arithmetic and traffic: the longer of them, and softly where they are alike.
_SOFTNESS = 3.0
# cuDNN's kernels for many groups in channels_last: groups in whole warps, and few channels each.
_WARP, _NARROW = 32, 32
# Matrix units read 16 bytes at a time: rows that do not begin at such an address take kernels that read less. Of a product any
# side may be a row's length, so that an odd number of tokens counts too. Convolutions want channels by eights in any type.
_READ_BYTES, _ALIGNED = 16, 8
# Watts per multiprocessor and GHz that products draw at full rate, on float32 units and on matrix units: what boards sustain
# under them (of Pascal: per 64 lanes). Below that clocks fall, more slowly than power, as voltage falls too.
_DRAWN_W = {
    "Pascal": (2.4, 2.4),
    "Volta": (1.9, 2.2),
    "Turing": (1.9, 2.2),
    "Ampere": (1.9, 1.9),
    "Ada": (1.15, 1.74),
    "Hopper": (1.5, 3.4),
    "Blackwell": (1.15, 1.74),
    "Blackwell HBM": (1.5, 5.2),
}
_CLOCK_BY_POWER = 0.7
# From Hopper on matrix units read their factors from shared memory by themselves (wgmma), and cuDNN's convolutions are fed so
# much better by its multiprocessors.
_FED_BY_ITSELF, _WITH_WGMMA = 3.0, ("Hopper", "Blackwell HBM")
# What feeds attention is its softmax, of every score once, however wide a head is: it counts as heads of so many columns do
# (an H200 takes as long for a score with heads of 64 and of 128, forward and backward).
_SCORE_COLUMNS = 64.0
# The power that kernels draw which wait for memory, over that of products at full rate.
_WAITING = 0.65
# Operations per cycle and multiprocessor of GeForce's matrix units, halved for float32 accumulation: they draw no more than the
# float32 units, and these boards run beyond their datasheet's boost clock while power allows: an RTX 3090 at 1.9 GHz, not 1.7.
_HALVED, _BEYOND_BOOST = 512, 1.12
# Grouped and depthwise convolutions wait for addresses and loads: multiprocessors issue as many instructions per cycle with 64
# lanes as with 128, whose rate this is.
_ISSUED = 256
_PRODUCTS = ("convolution", "matrix_product", "attention", "recurrent")
_BY_LAYOUT = (
    *("convolution", "grouped_convolution", "depthwise_convolution"),
    *("normalisation", "native_normalisation", "pooling"),
)
# A row of a layer norm takes a multiprocessor so many cycles however short it is (an H200; `benchmarks/measured` has steps with
# rows of 96 to 4096).
_ROW_CYCLES = 250.0
# In channels_first a batch norm's statistics, and the sums of its backward pass, are one block of threads per channel, which
# waits for its loads: so many cycles an element whatever its type (an H200: 16 channels take as long as 128 of the same size),
# forward and backward, of cuDNN's kernels and of torch's own. So many blocks fill a multiprocessor.
_CHANNEL_CYCLES = {"normalisation": (1.3, 2.8), "native_normalisation": (1.8, 3.5)}
_CHANNELS_AT_ONCE = 2.0
# Average pools wait for their instructions: cycles of an element that they write, and of each that it is made of (an H200,
# whatever the type): forward in channels_first and channels_last, and backward.
_POOL_CYCLES = ((2.6, 0.12), (4.0, 0.38), (4.05, 0.45))
# Grouped convolutions in channels_last by cuDNN 9, on generations that it has kernels for (an H200's; RTX 3090 and 4090 take
# as long forward, by steps that no constant saw): with a power of two of channels in a group they are a pass over memory, and
# with whole tiles of channels dense ones. Others take so many cycles for an element and a tap of a filter. Some gradients take
# several times as long, and strided ones above all. What older cuDNNs did is known of torch 1.12's.
CUDNN = 9
"""cuDNN's version in today's torch."""
_WITH_OWN_KERNELS = ("Ampere", "Ada", "Hopper", "Blackwell")
_TILE_CHANNELS, _TAP_CYCLES = 64, 0.68
# How many times as long, beside what the above says: dense ones' gradient of the input, strided, of fewer groups than sixteen,
# and of more, and of the weights in float32; passes that are strided, forward and for the input in a half type and in float32,
# and for the weights in float32, and in a half type with so few channels; and others that are strided.
_MANY_GROUPS, _DENSE_INPUT, _DENSE_WEIGHTS = 16, (4.0, 1.5, 0.5), 3.6
_STRIDED_PASS, _PASS_WEIGHTS, _FEWEST_CHANNELS, _STRIDED_TAPS = (0.55, 1.5, 2.5), (2.6, 9.0), 4, 1.5
_LAYOUTS = ("channels_first", "channels_last")
# Products whose rows do not begin where matrix units read: rows of an even length are read by twos or fours, others one by one.
_MISALIGNED = ("matrix_product/misaligned", "matrix_product/odd")
# The gradient of the weights of these is a kernel of its own kind, far slower than the others.
_OWN_WEIGHTS = (
    "grouped_convolution/channels_last",
    "grouped_convolution/channels_last/narrow",
    "depthwise_convolution/channels_first",
    "depthwise_convolution/channels_first/torch",
    "depthwise_convolution/channels_last",
)
# In channels_first torch asks cuDNN for a depthwise convolution in float16 alone, from so many channels on, for these filters,
# and with a stride only from so many channels on (ConvParams::use_cudnn_depthwise); the rest are kernels of its own. There the
# gradient of a weight is one block of 256 threads per channel and tap, of which so many fill a multiprocessor.
_CUDNN_CHANNELS, _CUDNN_TAPS, _CUDNN_STRIDED, _FILLING = 32, (1, 9, 25), 512, 6.0


# The traffic of grouped convolutions that are a pass over memory.
_PASS = "grouped_convolution/channels_last/pass"


def _names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (names of all shares of arithmetic, names of all shares of traffic), such as "convolution/tensor/channels_last".

    A name stands for one calibrated constant. It is a class of kernels, followed by what else its share of the datasheet's rate
    depends on: the unit that computes ("tensor" or "vector"), the memory layout, the alignment. Grouped and depthwise
    convolutions are in both, because their arithmetic and their traffic add up.
    """
    arithmetic = [f"{name}/{unit}" for name in _PRODUCTS[1:] for unit in ("tensor", "vector")]
    arithmetic += [f"convolution/{unit}" for unit in ("tensor/channels_first", "tensor/channels_last", "vector")]
    arithmetic += ["matrix_product/tensor/tf32", *_MISALIGNED, "convolution/misaligned"]
    grouped = [
        "grouped_convolution/channels_first",
        "grouped_convolution/channels_last",
        "grouped_convolution/channels_last/narrow",
        *(f"depthwise_convolution/{layout}" for layout in _LAYOUTS),
        "depthwise_convolution/channels_first/torch",
    ]
    arithmetic += [f"{name}/weights" for name in _OWN_WEIGHTS]
    traffic = [name for name in CLASSES if name not in _BY_LAYOUT]
    traffic += [
        f"{name}/{layout}"
        for name in ("convolution", "normalisation", "native_normalisation", "pooling")
        for layout in _LAYOUTS
    ]
    return (*arithmetic, *grouped), (*traffic, "convolution/misaligned", *grouped, _PASS)


ARITHMETIC, TRAFFIC = _names()
# Names of ARITHMETIC whose kernels are limited, too, by what their instructions can feed the units per cycle.
FEED = tuple(
    name
    for name in ARITHMETIC
    if name in _MISALIGNED
    or (("/tensor" in name or name.endswith("/vector")) and not name.startswith("matrix_product"))
)
# Names of TRAFFIC whose kernels are limited, too, by what a multiprocessor can load and store per cycle: classes that are no
# products; for products, that limit is part of FEED.
CARRIED = tuple(
    name for name in TRAFFIC if not name.startswith((*_PRODUCTS, "grouped_convolution", "depthwise_convolution"))
)
_ARITHMETIC = {name: place for place, name in enumerate(ARITHMETIC)}
_TRAFFIC = {name: place for place, name in enumerate(TRAFFIC)}


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The rates that kernels reach on one device; every share is of the datasheet's figure for the device."""

    arithmetic: Mapping[str, float]
    """Shares of peak FLOP/s by ARITHMETIC name; for grouped convolutions, shares of the rate of 128 lanes."""
    traffic: Mapping[str, float]
    """Shares of the memory's bandwidth by TRAFFIC name."""
    feed: Mapping[str, float]
    """By FEED name, the operations per cycle for which a multiprocessor can feed its units."""
    carried: Mapping[str, float]
    """By CARRIED name, the bytes per cycle that a multiprocessor can move, however fast the memory is."""
    start_s: float
    """Seconds between two kernels on the device."""
    cache: float
    """Share of a kernel's traffic that the last cache saves where all of it fits."""
    issue_s: float
    """Seconds in which the host issues one op; views take a quarter."""
    update_s: float
    """Seconds of the update per parameter tensor, beside its traffic."""
    turn_s: float
    """Seconds between two steps of a recurrent layer, which wait for each other."""
    units: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(UNITS, 1.0))
    """Factors of the device's generation on the shares: of "tensor" (matrix units), "vector" (float32 units), "memory"."""


# For a CPU, or any device that reaches its datasheet's rates: launches and the host take no time.
DATASHEET = Constants(
    arithmetic=dict.fromkeys(ARITHMETIC, 1.0),
    traffic=dict.fromkeys(TRAFFIC, 1.0),
    feed={},
    carried={},
    start_s=0.0,
    cache=0.0,
    issue_s=0.0,
    update_s=0.0,
    turn_s=0.0,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Demand:
    """The work of ``k`` kernels in seconds of one device at its datasheet rates; :func:`seconds` makes times of it.

    It does not depend on the calibrated constants, so that a fit computes it only once.
    """

    arithmetic_s: Floats
    """(k,) seconds at peak, with tiles and waves."""
    arithmetic_of: NDArray[np.intp]
    """(k,) index into ARITHMETIC; -1: the kernel is no matrix product, and bound by memory whatever the peak."""
    on_tensor: Flags
    """(k,) whether the peak is that of matrix units."""
    fed_s: Floats
    """(k,) seconds of the operations at one per cycle and multiprocessor, which is divided by how many operations per cycle the
    instructions can feed the units for; 0 for kernels that are no products, or unknown clocks."""
    traffic_s: Floats
    """(k,) seconds at full bandwidth."""
    traffic_of: NDArray[np.intp]
    """(k,) index into TRAFFIC."""
    carried_s: Floats
    """(k,) seconds of the bytes at one per cycle and multiprocessor; 0 where clocks are unknown, and where ``rows_s`` includes
    the loads."""
    cached: Floats
    """(k,) part of the traffic that the last cache could hold, 0 to 1."""
    turns: Floats
    """(k,) steps that wait for each other, of recurrent layers; 0 for any other kernel."""
    rows_s: Floats
    """(k,) seconds beside those of the bytes: of rows of layer norms, channels of batch norms in channels_first, elements of
    average pools, and taps of grouped convolutions."""
    serial: Flags
    """(k,) whether arithmetic and traffic add up instead of overlapping: grouped convolutions."""

    def then(self, other: Demand) -> Demand:
        """Return the demand of these kernels followed by those of ``other``."""
        return Demand(**{f.name: np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)})


def demand_of(
    kernels: Kernels, device: Device, *, precision: str = "fp32", brief: bool = False, cudnn: int = CUDNN
) -> Demand:
    """Return the demand of the kernels on a device: their work in seconds at its datasheet rates. O(k).

    The work of products includes the padding to tiles and the idle part of the last wave; clocks are those that the power
    limit allows. If a device's clock or number of multiprocessors is unknown (0), terms that depend on them are 0.

    Args:
        kernels: k kernels that run one after another.
        device: the device with its datasheet.
        precision: a name as in :class:`Numerics`; it decides whether float32 products use TF32.
        brief: the kernels run alone for milliseconds, too short for the power limit, so that matrix units keep the boost clock.
        cudnn: the version of cuDNN; before 9, kernels are those of torch 1.12.
    """
    grouped = _GroupedKernels.on(device, kernels, cudnn)
    kernels = grouped.with_dense(kernels)
    peak, on_tensor = _peaks(kernels, device, precision)
    vector_clock = sustained(device, matrix=False)
    matrix_clock = 1.0
    if not brief:
        matrix_clock = sustained(device, matrix=True, share=_share_of_products(kernels, device, peak, on_tensor))
    clock_share = np.where(on_tensor, matrix_clock, vector_clock)
    peak *= clock_share
    is_grouped = (kernels.kind == CLASS["grouped_convolution"]) | (kernels.kind == CLASS["depthwise_convolution"])
    grouped_peak = vector_clock * (_ISSUED * device.multiprocessors * device.clock_hz or device.peak_flops["float32"])
    arithmetic_of, traffic_of = _index_constants(kernels, on_tensor)
    arithmetic_of[grouped.is_pass] = -1
    traffic_of[grouped.is_pass] = _TRAFFIC[_PASS]
    is_product = arithmetic_of >= 0
    flops = grouped.times * _occupied_flops(kernels, device, peak, arithmetic_of)
    # Attention is fed as if every head had _SCORE_COLUMNS columns.
    is_attention = (kernels.gemm[:, 1] > 0) & (kernels.kind == CLASS["attention"])
    fed_flops = np.where(is_attention, flops * _SCORE_COLUMNS / np.maximum(kernels.gemm[:, 3], 1.0), flops)
    is_fed_by_itself = (kernels.kind == CLASS["convolution"]) & (device.branch in _WITH_WGMMA)
    boost_cycles_per_s = device.multiprocessors * device.clock_hz or np.inf  # of all multiprocessors together
    fed_s = fed_flops / (clock_share * boost_cycles_per_s) * (~is_grouped & is_product)
    traffic_s = _traffic_s(kernels, device)
    rows_s, is_carried = _beside_bytes(kernels, device, traffic_s)
    return Demand(
        arithmetic_s=np.where(is_product, flops / np.where(is_grouped, grouped_peak, peak), 0.0),
        arithmetic_of=arithmetic_of,
        on_tensor=on_tensor & ~is_grouped,
        fed_s=fed_s / np.where(is_fed_by_itself, _FED_BY_ITSELF, 1.0),
        traffic_s=np.where(grouped.is_pass, grouped.times, 1.0) * traffic_s,
        traffic_of=traffic_of,
        carried_s=np.where(is_carried, kernels.moved_bytes / boost_cycles_per_s, 0.0),
        cached=np.minimum(1.0, _KEPT * device.l2_bytes / np.maximum(kernels.moved_bytes, 1.0)),
        turns=np.where(kernels.kind == CLASS["recurrent"], kernels.gemm[:, 0], 0.0),
        rows_s=rows_s + grouped.tap_cycles / boost_cycles_per_s,
        serial=is_grouped,
    )


# Classes whose products are not cut into tiles of one result.
_UNTILED = [CLASS[name] for name in ("grouped_convolution", "depthwise_convolution", "attention", "recurrent")]


def _occupied_flops(kernels: Kernels, device: Device, peak: Floats, arithmetic_of: NDArray[np.intp]) -> Floats:
    """Return (k,) the operations that the device could do in the time for which each kernel occupies it.

    They are more than the kernel's own where part of the device idles: in padded tiles, in a last wave that is partly filled,
    and in kernels with too few blocks. ``peak`` (k,): FLOP/s that each kernel's units can reach. ``arithmetic_of`` (k,):
    indices into ARITHMETIC. A device whose multiprocessors are unknown gets the kernels' own operations.
    """
    flops = kernels.flops.copy()
    if not device.multiprocessors:
        return flops
    # A tile's start and end take as long as so many steps of its inner loop: operations in _EDGE cycles over those of a step.
    largest_rows, largest_columns, _ = _TILES[0]
    step_flops = 2.0 * largest_rows * largest_columns
    edge_steps = _EDGE * peak / step_flops / (device.multiprocessors * device.clock_hz or np.inf)
    has_shape = kernels.gemm[:, 1] > 0
    is_tiled = has_shape & ~np.isin(kernels.kind, _UNTILED)
    flops[is_tiled] = tiled_flops(kernels.gemm[is_tiled], device.multiprocessors, edge_steps[is_tiled])
    is_recurrent = has_shape & (kernels.kind == CLASS["recurrent"])
    if is_recurrent.any():  # the steps run one after another: each alone fills the device, or does not
        one_step = kernels.gemm[is_recurrent].copy()
        one_step[:, 0] = 1.0  # the count
        step_tiled_flops = tiled_flops(one_step, device.multiprocessors, edge_steps[is_recurrent])
        flops[is_recurrent] *= step_tiled_flops / (2.0 * one_step.prod(axis=1))
    is_torch_weights = arithmetic_of == _ARITHMETIC["depthwise_convolution/channels_first/torch/weights"]
    # A block of threads for each channel and tap.
    blocks = kernels.gemm[is_torch_weights, 0] * kernels.gemm[is_torch_weights, 2]
    flops[is_torch_weights] *= np.maximum(1.0, _FILLING * device.multiprocessors / np.maximum(blocks, 1.0))
    return flops


@dataclass(frozen=True, kw_only=True, eq=False)
class _GroupedKernels:
    """Which of ``k`` kernels are grouped convolutions in channels_last, and how cuDNN 9 runs each of them.

    There are three ways: as a dense convolution, as a pass over memory, and by a general kernel that takes its time for every
    tap of a filter. An older cuDNN, or a generation without kernels for it, does none of this: then all fields say "none".
    """

    is_dense: Flags
    """(k,) those that run as dense ones."""
    is_pass: Flags
    """(k,) those that are bound by memory, or by the cycles below."""
    tap_cycles: Floats
    """(k,) the cycles of all multiprocessors for the taps of those that run in the general kernel; else 0."""
    times: Floats
    """(k,) how many times as long those take as their work says; 1 for all other kernels."""

    @classmethod
    def on(cls, device: Device, kernels: Kernels, cudnn: int) -> _GroupedKernels:
        """Return them for a device and a version of cuDNN; none for an older version, or an older generation."""
        is_here = (kernels.kind == CLASS["grouped_convolution"]) & kernels.is_channels_last
        is_here &= cudnn >= CUDNN and device.architecture in _WITH_OWN_KERNELS
        groups = kernels.gemm[:, 0]
        channels = _group_channels(kernels)
        is_power_of_two = 2.0 ** np.round(np.log2(np.maximum(channels, 1.0))) == channels
        is_dense = is_here & (channels % _TILE_CHANNELS == 0)
        is_memory_pass = is_here & ~is_dense & is_power_of_two
        is_by_taps = is_here & ~is_dense & ~is_power_of_two
        is_forward = kernels.direction == FORWARD
        is_input = kernels.direction == INPUT_GRADIENT
        is_weights = kernels.direction == WEIGHT_GRADIENT
        is_wide = kernels.width > 2.0  # float32
        positions = np.where(is_weights, kernels.gemm[:, 3], kernels.gemm[:, 1])  # pixels of all output images
        # What goes in beside what comes out, as many elements where the stride is 1.
        is_strided = kernels.moved_bytes / kernels.width > 3.0 * groups * channels * positions
        strided_input, few_groups, many_groups = _DENSE_INPUT
        pass_forward, pass_input, pass_input_wide = _STRIDED_PASS
        pass_weights_wide, pass_weights_few = _PASS_WEIGHTS
        slower = (  # the first condition that holds decides
            (is_dense & is_input & is_strided, strided_input),
            (is_dense & is_input & (groups < _MANY_GROUPS), few_groups),
            (is_dense & is_input, many_groups),
            (is_dense & is_weights & is_wide, _DENSE_WEIGHTS),
            (is_memory_pass & is_forward & is_strided, pass_forward),
            (is_memory_pass & is_input & is_strided & ~is_wide, pass_input),
            (is_memory_pass & is_input & is_strided, pass_input_wide),
            (is_memory_pass & is_weights & is_wide, pass_weights_wide),
            (is_memory_pass & is_weights & (channels <= _FEWEST_CHANNELS), pass_weights_few),
            (is_by_taps & is_strided, _STRIDED_TAPS),
        )
        times = np.select([condition for condition, _ in slower], [factor for _, factor in slower], 1.0)
        # Elements written and taps of each: the operations (two for a channel of the group) over its channels.
        tap_cycles = np.where(is_by_taps, times * _TAP_CYCLES * kernels.flops / (2.0 * np.maximum(channels, 1.0)), 0.0)
        return cls(is_dense=is_dense, is_pass=is_memory_pass | is_by_taps, tap_cycles=tap_cycles, times=times)

    def with_dense(self, kernels: Kernels) -> Kernels:
        """Return the kernels with those that run as dense convolutions moved into the class of these."""
        return replace(kernels, kind=np.where(self.is_dense, CLASS["convolution"], kernels.kind).astype(np.int8))


def _group_channels(kernels: Kernels) -> Floats:
    """Return (k,) the output channels of a group, for kernels of grouped convolutions; for others it has no meaning.

    The filter is taken to have several taps, so that the smaller of two sides of the product is that of the channels.
    """
    gemm = kernels.gemm
    is_weights = kernels.direction == WEIGHT_GRADIENT
    channels: Floats = np.where(is_weights, gemm[:, 1], np.minimum(gemm[:, 2], gemm[:, 3]))
    return channels


def _traffic_s(kernels: Kernels, device: Device) -> Floats:
    """Return (k,) the seconds of the kernels' bytes at the full bandwidth of the device's memory."""
    found: Floats = kernels.moved_bytes / (device.free_of_codes * device.memory_bytes_per_s)
    return found


def _beside_bytes(kernels: Kernels, device: Device, traffic_s: Floats) -> tuple[Floats, Flags]:
    """Return what limits norms and average pools beside their bytes: (seconds (k,), whether loads count as well (k,)).

    The seconds are those of the rows of layer norms, of the channels of batch norms in channels_first, and of the elements of
    average pools; 0 for other kernels. The last two include the loads, which then do not count again (``Demand.carried_s``).
    ``traffic_s`` (k,): the seconds of the bytes (:func:`_traffic_s`); of a pool only what exceeds them is returned.
    """
    cycles_per_s = device.multiprocessors * device.clock_hz or np.inf  # of all multiprocessors together
    # Of a layer norm the rows, of a batch norm the channels, of a pool the elements written; and of how many elements each is.
    rows, elements_each = kernels.gemm[:, 0], kernels.gemm[:, 3]
    rows_s = np.where(kernels.kind == CLASS["row_normalisation"], rows * _ROW_CYCLES, 0.0) / cycles_per_s
    is_pool = (kernels.kind == CLASS["pooling"]) & (rows > 0)
    pool_case = np.where(kernels.direction == FORWARD, kernels.is_channels_last.astype(int), 2)  # into _POOL_CYCLES
    written_cycles, read_cycles = np.array(_POOL_CYCLES)[pool_case].T
    pools_s = rows * (written_cycles + read_cycles * elements_each) / cycles_per_s
    rows_s[is_pool] = np.maximum(0.0, pools_s - traffic_s)[is_pool]
    is_carried = ~is_pool
    for name, (forward_cycles, backward_cycles) in _CHANNEL_CYCLES.items():
        is_by_channels = (kernels.kind == CLASS[name]) & ~kernels.is_channels_last & (rows > 0)
        channel_cycles = np.where(kernels.direction == FORWARD, forward_cycles, backward_cycles) * elements_each
        # All multiprocessors are occupied for one channel's time at least, also those without a channel.
        occupied = np.maximum(device.multiprocessors, rows / _CHANNELS_AT_ONCE)
        rows_s[is_by_channels] = (channel_cycles * occupied / cycles_per_s)[is_by_channels]
        is_carried &= ~is_by_channels
    return rows_s, is_carried


def _share_of_products(kernels: Kernels, device: Device, peak: Floats, on_tensor: Flags) -> float:
    """Return the share of the kernels' time, 0 to 1, in which matrix units compute; 1 for a product alone.

    It decides how much power the device draws: kernels that wait for memory draw less, and the power limit holds for the mean
    over far longer than a kernel. ``peak`` (k,): FLOP/s of each kernel's type; ``on_tensor`` (k,): whether that is the rate of
    matrix units.
    """
    arithmetic_s = np.where(on_tensor & (kernels.gemm[:, 1] > 0), kernels.flops / peak, 0.0)
    longer_s = float(np.maximum(arithmetic_s, _traffic_s(kernels, device)).sum())
    return float(arithmetic_s.sum()) / longer_s if longer_s > 0 else 1.0


def sustained(device: Device, *, matrix: bool, share: float = 1.0) -> float:
    """Return the clock that products hold under the device's power limit, as a share of its boost clock.

    1.0 for devices whose datasheet lacks clock, power or generation; GeForce boards may exceed 1.

    Args:
        device: the device with its datasheet.
        matrix: whether the products run on matrix units, or on float32 units.
        share: the share of the time, 0 to 1, in which matrix units compute; the rest of it draws :data:`_WAITING` as much
            power. It has no effect without ``matrix``.
    """
    cycles_per_s = device.clock_hz * device.multiprocessors
    drawn = _DRAWN_W.get(device.branch) or _DRAWN_W.get(device.architecture)
    if not (drawn and cycles_per_s and device.power_w):
        return 1.0
    vector_w, matrix_w = drawn  # per multiprocessor and GHz
    float16_peak = device.peak_for("float16")
    # GeForce is recognized by matrix units of at most the halved rate, with a tolerance of a fifth for other clocks.
    is_halved = (
        device.architecture not in _WITHOUT_MATRIX_UNITS
        and _MATRIX_UNIT * device.peak_flops["float32"] < float16_peak <= 1.2 * _HALVED * cycles_per_s
    )
    # Halved matrix units draw no more than float32 units.
    drawn_w = 1e-9 * cycles_per_s * (matrix_w if matrix and not is_halved else vector_w)
    if matrix:
        drawn_w *= share + (1.0 - share) * _WAITING
    if device.architecture in _WITHOUT_MATRIX_UNITS:  # the table's watts are of 64 lanes, each of 2 operations a cycle
        drawn_w *= device.peak_flops["float32"] / cycles_per_s / 128.0
    clock: float = (device.power_w / drawn_w) ** _CLOCK_BY_POWER
    return min(_BEYOND_BOOST if is_halved else 1.0, clock)


def seconds(demand: Demand, constants: Constants) -> Floats:
    """Return (k,) the seconds of every kernel: its start, and the longer of its arithmetic and its traffic.

    ``demand``: the seconds that kernels would take at the datasheet's rates; ``constants``: which shares of these they reach.
    If arithmetic and traffic take about equally long, the kernel takes somewhat more than either.
    """
    units = constants.units
    index = np.maximum(demand.arithmetic_of, 0)  # kernels without a product take any share: their arithmetic is 0
    unit_factor = np.where(demand.on_tensor, units["tensor"], units["vector"])
    reached_share = np.array([constants.arithmetic[name] for name in ARITHMETIC])[index] * unit_factor
    feed_per_cycle = np.array([constants.feed.get(name, np.inf) for name in ARITHMETIC])[index]
    arithmetic_s = demand.arithmetic_s / reached_share + demand.fed_s / feed_per_cycle
    # If it is not known how matrix units are fed, they are at most as fast as their datasheet.
    is_unfed = demand.on_tensor & (demand.fed_s == 0.0)
    arithmetic_s = np.where(is_unfed, np.maximum(arithmetic_s, demand.arithmetic_s), arithmetic_s)
    traffic_shares = np.array([constants.traffic[name] for name in TRAFFIC])[demand.traffic_of] * units["memory"]
    carried_per_cycle = np.array([constants.carried.get(name, np.inf) for name in TRAFFIC])[demand.traffic_of]
    traffic_s = demand.traffic_s * (1.0 - constants.cache * demand.cached) / traffic_shares
    traffic_s = traffic_s + demand.carried_s / carried_per_cycle + demand.rows_s
    longer_s, shorter_s = np.maximum(arithmetic_s, traffic_s), np.minimum(arithmetic_s, traffic_s)
    ratio = np.divide(shorter_s, longer_s, out=np.zeros_like(longer_s), where=longer_s > 0)
    busy_s: Floats = np.where(
        demand.serial, arithmetic_s + traffic_s, longer_s * (1.0 + ratio**_SOFTNESS) ** (1.0 / _SOFTNESS)
    )
    return constants.start_s + constants.turn_s * demand.turns + busy_s


def by_library(demand: Demand) -> Flags:
    """Return (k,) whether a kernel's time depends on the version of its library (cuDNN) more than on the device.

    It does for grouped and recurrent layers. ``demand``: of ``k`` kernels.
    """
    is_of_library = [name.startswith(("grouped_convolution/channels_last", "recurrent")) for name in ARITHMETIC]
    is_bound: Flags = (demand.arithmetic_of >= 0) & np.array(is_of_library)[demand.arithmetic_of]
    is_bound |= demand.traffic_of == _TRAFFIC[_PASS]
    return is_bound


def tiled_flops(gemm: Floats, multiprocessors: int, edge: Floats | float) -> Floats:
    """Return (k,) the operations for whose time products of shape ``gemm`` (k, 4) occupy a device, with padding and waves.

    A library computes a product in tiles of the result, one per multiprocessor at a time. Tiles run in waves, the last of which
    may be partly filled; with fewer tiles than multiprocessors the inner dimension k is split into parts. Of the usual sizes of
    tiles the fastest is taken.

    Args:
        gemm: (k, 4) count, m, n, k of each product.
        multiprocessors: those of the device, at least 1.
        edge: how many steps of a tile's inner loop its start and end take; a number for all products or (k,).
    """
    processors = float(multiprocessors)
    count, m, n, k = gemm.T
    least_flops = np.full(len(gemm), np.inf)
    tiles_both_ways = {
        (tile_m, tile_n, tile_rate)
        for side, other_side, tile_rate in _TILES
        for tile_m, tile_n in ((side, other_side), (other_side, side))
    }
    for rows, columns, rate in tiles_both_ways:
        tiles = count * np.ceil(m / rows) * np.ceil(n / columns)
        # The inner dimension is split into as many parts as give every processor a tile, but none shorter than _SPLIT.
        most_parts = np.maximum(1.0, np.floor(k / _SPLIT))
        parts = np.where(tiles < processors, np.minimum(np.ceil(processors / tiles), most_parts), 1.0)
        filled_waves = tiles * parts / processors
        waves = np.where(filled_waves < 1.0, 1.0, filled_waves + _TAIL * (np.ceil(filled_waves) - filled_waves))
        occupied_flops = waves * processors / parts * rows * columns * 2.0 * (k + edge * parts) / rate
        least_flops = np.minimum(least_flops, occupied_flops)
    return least_flops


def _peaks(kernels: Kernels, device: Device, precision: str) -> tuple[Floats, Flags]:
    """Return (k,) the datasheet's FLOP/s for each kernel's type, and (k,) whether that is the matrix units' rate.

    The rate of matrix units is the higher one that a device has for the type, if it is well above that of float32 units.
    float32 kernels use TF32 under ``precision`` tf32; convolutions and recurrent layers do so by torch's default.
    """
    vector_peak = device.peak_flops["float32"]
    tf32_peak = device.peak_flops.get("tf32", vector_peak)
    may_use_tf32 = np.isin(kernels.kind, [CLASS["convolution"], CLASS["recurrent"]])
    dtypes = sorted(set(kernels.dtype))
    peak_of = dict(zip(dtypes, (device.peak_for(name) for name in dtypes), strict=True))
    peak = np.array([peak_of[name] for name in kernels.dtype], dtype=np.float64)
    is_float32 = np.array([name == "float32" for name in kernels.dtype], dtype=bool)
    is_fused = kernels.kind == CLASS["attention"]  # its kernels for float32 do not use matrix units
    peak[is_float32 & ~is_fused & (may_use_tf32 | (precision == "tf32"))] = tf32_peak
    if device.architecture in _WITHOUT_MATRIX_UNITS:  # whatever float16 could do: libraries accumulate in float32
        return np.minimum(peak, vector_peak), np.zeros(len(kernels), dtype=bool)
    return peak, peak > _MATRIX_UNIT * vector_peak


def _index_constants(kernels: Kernels, on_tensor: Flags) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return (k,) each kernel's index into ARITHMETIC (-1: no matrix product), and (k,) its index into TRAFFIC.

    The indices say which calibrated constants hold for a kernel. ``on_tensor`` (k,): whether a kernel runs on matrix units.
    """
    # The order of the assignments matters: later, more special ones override earlier ones.
    kinds, gemm, is_last = kernels.kind, kernels.gemm, kernels.is_channels_last
    arithmetic = np.full(len(kernels), -1, dtype=np.intp)
    traffic = np.zeros(len(kernels), dtype=np.intp)
    for name, class_index in CLASS.items():
        for layout, is_of_layout in zip(_LAYOUTS, (~is_last, is_last), strict=True):
            # A class has one constant for both layouts, or one for each.
            constant = _TRAFFIC.get(name, _TRAFFIC.get(f"{name}/{layout}", 0))
            traffic[(kinds == class_index) & is_of_layout] = constant
    for name in _PRODUCTS[1:]:
        is_chosen = kinds == CLASS[name]
        arithmetic[is_chosen & on_tensor] = _ARITHMETIC[f"{name}/tensor"]
        arithmetic[is_chosen & ~on_tensor] = _ARITHMETIC[f"{name}/vector"]
    is_uneven = (kernels.sets_alignment & (gemm[:, 1:] % _ALIGNED != 0)).any(axis=1) & (gemm[:, 1] > 0)
    # Elements read at a time, rounded down to a power of two: a width that includes a part of a scale gives none.
    read_together = 2.0 ** np.floor(np.log2(_READ_BYTES / kernels.width))
    # A row begins where matrix units read if the rows' length is a multiple of what is read at a time; their number is free. An
    # RTX 3090 took 34.2 ms a sample for ViT-L at 384 pixels in 12 x 577 rows, and 37.1 in 8 x 577 (timm, torch 1.11 and 1.10).
    is_misread = (kernels.sets_alignment & (gemm[:, 1:] % read_together[:, None] != 0)).any(axis=1) & (gemm[:, 1] > 0)
    is_on_tensor_product = (kinds == CLASS["matrix_product"]) & on_tensor
    is_tf32 = np.array([name == "float32" for name in kernels.dtype], dtype=bool)
    arithmetic[is_on_tensor_product & is_tf32] = _ARITHMETIC["matrix_product/tensor/tf32"]
    arithmetic[is_on_tensor_product & is_misread] = _ARITHMETIC["matrix_product/misaligned"]
    is_odd = (kernels.sets_alignment & (gemm[:, 1:] % 2 != 0)).any(axis=1)
    arithmetic[is_on_tensor_product & is_misread & is_odd] = _ARITHMETIC["matrix_product/odd"]
    is_convolution = kinds == CLASS["convolution"]
    arithmetic[is_convolution & ~on_tensor] = _ARITHMETIC["convolution/vector"]
    is_misaligned = is_convolution & on_tensor & is_uneven & is_last
    is_grouped = kinds == CLASS["grouped_convolution"]
    is_depthwise = kinds == CLASS["depthwise_convolution"]
    is_narrow = (gemm[:, 0] % _WARP == 0) & (_group_channels(kernels) <= _NARROW)
    for layout, is_of_layout in zip(_LAYOUTS, (~is_last, is_last), strict=True):
        arithmetic[is_convolution & on_tensor & is_of_layout] = _ARITHMETIC[f"convolution/tensor/{layout}"]
    arithmetic[is_misaligned] = _ARITHMETIC["convolution/misaligned"]
    traffic[is_misaligned] = _TRAFFIC["convolution/misaligned"]
    for name, is_chosen in (
        ("grouped_convolution/channels_first", is_grouped & ~is_last),
        ("grouped_convolution/channels_last", is_grouped & is_last),
        ("grouped_convolution/channels_last/narrow", is_grouped & is_last & is_narrow),
        ("depthwise_convolution/channels_first", is_depthwise & ~is_last),
        ("depthwise_convolution/channels_first/torch", is_depthwise & ~is_last & _is_torch_depthwise(kernels)),
        ("depthwise_convolution/channels_last", is_depthwise & is_last),
    ):
        arithmetic[is_chosen] = _ARITHMETIC[name]
        traffic[is_chosen] = _TRAFFIC[name]
        if name in _OWN_WEIGHTS:  # the gradient of the weights has a constant of its own
            arithmetic[is_chosen & (kernels.direction == WEIGHT_GRADIENT)] = _ARITHMETIC[f"{name}/weights"]
    return arithmetic, traffic


def _is_torch_depthwise(kernels: Kernels) -> Flags:
    """Return (k,) whether a depthwise convolution in channels_first runs in torch's own kernels."""
    gemm = kernels.gemm  # count (channels), m, n, k, whose order depends on the direction (kernels_of)
    channels, is_forward = gemm[:, 0], kernels.direction == FORWARD
    taps = np.where(is_forward, gemm[:, 3], gemm[:, 2])
    positions = np.where(kernels.direction == WEIGHT_GRADIENT, gemm[:, 3], gemm[:, 1])
    is_strided = kernels.moved_bytes / kernels.width > 3.0 * channels * positions  # what goes in beside what comes out
    is_float16 = np.array([name == "float16" for name in kernels.dtype], dtype=bool)
    is_cudnn = is_float16 & (channels >= _CUDNN_CHANNELS) & np.isin(taps, _CUDNN_TAPS)
    is_cudnn &= ~is_strided | (channels >= _CUDNN_STRIDED)
    is_torch: Flags = (kernels.kind == CLASS["depthwise_convolution"]) & ~is_cudnn
    return is_torch
