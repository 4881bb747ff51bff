"""Linear layers whose rows may be several checkpoint tensors, and how they are split over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.engine.cpu.forms import ROUNDED
from server.engine.cpu.pack import keeps_codes, pack_plain, pack_quantized, pack_rounded
from server.engine.cpu.weights import PackedWeight
from server.engine.kernels.available import compiles_for
from server.engine.kernels.expert_weights import Stack
from server.engine.layers.activation import silu_mul
from server.engine.layers.context import BuildContext
from server.engine.layers.embedding import VocabEmbedding
from server.engine.quantization.format import UNQUANTIZED, Unquantized, WeightFormat
from server.engine.quantization.stored import QuantizedTensors
from server.errors import UserError

# Tells oneDNN which layout to prefer. The layout it picks for 32 rows was the best one for 1 to 256 rows.
_PACK_ROWS = 32

MOST_COMPILED_ROWS = 64
"""No kernel of ours takes more."""


class Linear(nn.Module):
    """x @ weight.T + bias, where the weight's rows are the concatenated rows of named checkpoint tensors.

    Quantised weights stay as they are stored where products unpack them in registers: kernels on CUDA, C on a CPU if
    the context says so. Elsewhere they are dequantised once, at the end of loading.
    """

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],
        context: BuildContext,
        *,
        bias: bool = False,
        tied: VocabEmbedding | None = None,
        weight_format: WeightFormat = UNQUANTIZED,
    ) -> None:
        """Make the memory.

        Args:
            in_features: this rank's input width.
            shards: checkpoint name (the last part, such as "q_proj") -> this rank's rows of it, in order.
            context: dtype and device.
            bias: whether every shard has one.
            tied: the embedding whose weight, [rows, in_features], is this layer's; it is filled and finished before.
            weight_format: of every shard; each keeps its own scales.
        """
        super().__init__()
        self.shards = dict(shards)
        self.context = context
        self.weight_format = weight_format
        self._rounded = False
        rows = sum(self.shards.values())
        self.weight: nn.Parameter | None = None if tied is None else tied.weight
        self._tied = [] if tied is None else [tied]  # in a list: it is no part of this module
        self.quantized: dict[str, QuantizedTensors] = {}
        if tied is None and not isinstance(weight_format, Unquantized):
            for name, shard_rows in self.shards.items():
                stored = QuantizedTensors.allocate(weight_format, shard_rows, in_features, context.device)
                self.quantized[name] = stored
        elif tied is None:
            self.weight = context.parameter(rows, in_features)
        self.bias = context.parameter(rows) if bias else None
        self.packed: Tensor | None = None
        self.coded: PackedWeight | None = None
        self.stack: Stack | None = None
        self.counters: Tensor | None = None
        if compiles_for(context.device):
            from server.engine.kernels.linear import make_counters

            self.counters = make_counters(rows, context.device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, rows]."""
        if self.coded is not None and self.context.forms.packed_for(len(x)):
            return self.coded.product(x)
        if self.packed is not None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
            return product
        if self.stack is not None:
            from server.engine.kernels.packed_linear import packed_linear

            return packed_linear(x, self.stack, self.bias)
        assert self.weight is not None
        return linear(x, self.weight, self.bias, self.counters)

    @property
    def kept_as(self) -> str:
        """How the weight is kept: as it was stored, or rounded."""
        return ROUNDED if self._rounded else self.weight_format.label

    @property
    def forms(self) -> set[str]:
        """In which forms the weight is kept."""
        plain = "16bit" if self.context.dtype.itemsize == 2 else "plain"
        held = (("packed", self.coded), (plain, self.packed), (plain, self.weight))
        return {name for name, kept in held if kept is not None}

    def scores(self, x: Tensor) -> Tensor:
        """As `forward`, in float32 where that costs nothing."""
        if self.coded is not None and self.context.forms.packed_for(len(x)):
            return self.coded.product(x, torch.float32)
        out: Tensor = self(x)
        return out

    def best(self, x: Tensor, limit: int) -> Tensor | None:
        """Where the largest of the first `limit` of `scores(x)` is, int64 [T]; None if it must be sought."""
        if self.coded is None or not self.context.forms.packed_for(len(x)):
            return None
        return self.coded.best(x, limit)

    def highest(self, x: Tensor, limit: int) -> Tensor:
        """Where the largest of the first `limit` of `scores(x)` is, int64 [T]; of all where there are fewer."""
        best = self.best(x, limit)
        return self.scores(x)[:, :limit].max(-1).indices if best is None else best

    def gated(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of `forward(x)`, [T, in_features] -> [T, rows / 2]."""
        if self.counters is not None and self.weight is not None and self.bias is None:
            product = _few_rows(x, self.weight, None, self.counters, gated=True)
            if product is not None:
                return product
        return silu_mul(self(x))

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names, `prefix` (with its dot) + shard, and the rows they fill."""
        targets: dict[str, Tensor] = {}
        for name, stored in self.quantized.items():
            targets |= stored.targets(f"{prefix}{name}")
        for kind, memory in (("weight", self.weight), ("bias", self.bias)):
            if memory is not None:
                parts = torch.split(memory, list(self.shards.values()))
                targets |= {f"{prefix}{name}.{kind}": part for name, part in zip(self.shards, parts, strict=True)}
        return targets

    def finish_loading(self) -> None:
        """Bring weights into the layouts that products read, or dequantise them.

        On a CPU with bf16 instructions, keep the weight in oneDNN's layout in place of the plain one.

        In that layout, decode steps (up to some hundred rows) take 60 to 80 % of the time; long ones are even.

        Raises:
            UserError: quantised tensors contradict each other, or stand for numbers beyond the model's dtype.
        """
        if self.context.forms.packed:
            self.coded = self._code()
            if self.coded is not None and not self.context.forms.plain:
                self.quantized, self.weight = {}, None
                return
        if self.quantized:
            self.stack = self._pack()
            if self.stack is None:
                self.weight = self._dequantize()
            self.quantized = {}
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
            return
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
            self.weight = None

    def _code(self) -> PackedWeight | None:
        """The weights for the C products; None where these do not take them."""
        shards = list(self.quantized.values())
        for tied in self._tied:
            stored = tied.take_stored()
            shards = [] if stored is None else [stored]
        if shards and keeps_codes(shards[0].format, shards[0].columns):
            where = f"{self.context.prefix}{'|'.join(self.shards)}"
            for shard in shards:
                shard.check(where)
            coded = pack_quantized(shards, self.bias, where)
            if coded is not None:
                return coded
        if self.quantized:
            self.weight = self._dequantize()
            self.quantized = {}
        assert self.weight is not None
        if self.context.forms.rounded and isinstance(self.weight_format, Unquantized):
            rounded = pack_rounded(self.weight, self.bias)
            if rounded is None:
                where = f"{self.context.prefix}{'|'.join(self.shards)}"
                raise UserError(
                    f"{where}: its weights cannot be rounded to 8 bits. Set the draft's quantization to none."
                )
            self._rounded = True
            return rounded
        return pack_plain(self.weight, self.bias)

    def _pack(self) -> Stack | None:
        """The weights as kernels read them; None where no kernel does."""
        if self.counters is None or self.context.dtype not in (torch.bfloat16, torch.float16):
            return None
        from server.engine.kernels.packed_linear import pack, unpackable_linear

        shards = list(self.quantized.values())
        if unpackable_linear(shards, self.context.device) is not None:
            return None
        for name, stored in self.quantized.items():
            stored.check(f"{self.context.prefix}{name}")
        return pack(shards, self.context.dtype)

    def _dequantize(self) -> nn.Parameter:
        columns = next(iter(self.quantized.values())).columns
        whole = self.context.parameter(sum(self.shards.values()), columns)
        parts = torch.split(whole, list(self.shards.values()))
        for (name, stored), part in zip(self.quantized.items(), parts, strict=True):
            module = f"{self.context.prefix}{name}"
            stored.check(module)
            part.copy_(stored.dequantize(self.context.dtype))
            if part.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(part))).all()):
                dtype = str(self.context.dtype).removeprefix("torch.")
                raise UserError(f"{module}: its {stored.format.label} tensors stand for numbers beyond {dtype}")
        return whole


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, counters: Tensor | None = None) -> Tensor:
    """As torch's; few rows on CUDA take a kernel of ours where that is quicker.

    Args:
        x: [T, in_features].
        weight: contiguous [rows, in_features].
        bias: [rows].
        counters: of this weight, from `kernels.linear.make_counters`; None on devices without kernels.
    """
    if counters is not None:
        product = _few_rows(x, weight, bias, counters)
        if product is not None:
            return product
    return F.linear(x, weight, bias)


def _few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor, *, gated: bool = False
) -> Tensor | None:
    if len(x) > MOST_COMPILED_ROWS:
        return None
    from server.engine.kernels.linear import few_rows

    return few_rows(x, weight, bias, counters, gated=gated)


def column_parallel(
    in_features: int, shards: Mapping[str, int], context: BuildContext, *, bias: bool = False
) -> Linear:
    """Every rank holds all inputs and its share of each shard's rows (given as totals)."""
    own = {name: context.group.split(rows, name) for name, rows in shards.items()}
    return Linear(in_features, own, context, bias=bias, weight_format=context.weight_format(shards))


def row_parallel(
    in_features: int, name: str, out_features: int, context: BuildContext, *, bias: bool = False
) -> Linear:
    """Every rank holds its share of the inputs (`in_features` is the total) and all rows."""
    own = context.group.split(in_features, name)
    return Linear(own, {name: out_features}, context, bias=bias, weight_format=context.weight_format([name]))
