"""The known-op table: which saved tensors may be compressed, and why that is sound.

Autograd makes one node per differentiable op, whatever Python function, method, alias or composite
called the op. The table is keyed by the classes of these nodes, and by the attributes under which a
node holds its saved tensors. torch's `tools/autograd/derivatives.yaml` says what each backward
computes from them. A saved tensor that has no row is kept exactly.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.modules import _functions
from torch.utils.checkpoint import CheckpointFunction

from memtrain.activations.saved.aliases import callables
from memtrain.activations.saved.attention import KERNELS, Kernel

LINEAR = "the backward is linear in the tensor, so unbiased codes give an unbiased gradient"
EXPONENT = "the gradient is exact for the decompressed tensor; rules use 8 bits or more"
RESULT = "the backward recomputes the tensor; with dropout, the backward is linear in it"
LOGARITHM = "the backward computes exp() of the tensor: 8 bits, clamped where exp() is 0"
PROBABILITIES = "the backward is quadratic in the tensor: the bias is the variance of the codes"
SHAPE = "the backward reads only the tensor's shape: no byte is kept"
LOSSLESS = "a mask or indices: packed without loss"
REPLACED_OP = "memtrain's form of the op saves codes of the tensor; torch's form keeps the tensor"
DERIVATIVE = (
    "in memtrain's form of the op, codes of the derivative replace the tensor; if a rule requests "
    "codes of the tensor, the derivative is computed from them"
)

ATTENTION = "scaled_dot_product_attention"
UNSCALED_ATTENTION = "dot_product_attention"
"""The same op with a scale of 1 or more: its probabilities saturate."""
WIDE_ATTENTION = "wide_dot_product_attention"
"""The same with heads of `WIDE` elements or more: a score's error is above 0.2 with 8 bits."""
WIDE = 256

_F: Any = torch._C._functions  # pyright: ignore[reportAttributeAccessIssue]


def node_classes(*names: str) -> frozenset[type]:
    """Return the classes of autograd's nodes of these names that this version of torch has."""
    return frozenset(getattr(_F, name) for name in names if hasattr(_F, name))


PRODUCTS = node_classes(
    *("MmBackward0", "BmmBackward0", "AddmmBackward0", "BaddbmmBackward0", "AddbmmBackward0"),
    *("MvBackward0", "AddmvBackward0", "GroupedMmBackward0"),
)
"""Nodes of matrix products: the gradient of one factor does not grow if the other is small."""
MULTIPLIES, POWERS = node_classes("MulBackward0"), node_classes("PowBackward0")
VECTOR_NORMS = node_classes("LinalgVectorNormBackward0")
SUMS = VECTOR_NORMS | node_classes(
    *("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1")
)
SOFTMAXES = node_classes("SoftmaxBackward0", "SafeSoftmaxBackward0", "LogSoftmaxBackward0")
NORMS = node_classes(
    *("CudnnBatchNormBackward0", "FusedRmsNormBackward0", "MiopenBatchNormBackward0"),
    *("NativeBatchNormBackward0", "NativeGroupNormBackward0", "NativeLayerNormBackward0"),
)
LOG_SOFTMAX, LAYER_NORM = _F.LogSoftmaxBackward0, _F.NativeLayerNormBackward0
RMS_NORM: type = _F.FusedRmsNormBackward0
"""An RMS norm is a quotient: what is small before it is small after it."""
DROPOUT, GELU = _F.NativeDropoutBackward0, _F.GeluBackward0
CONVOLUTIONS = node_classes("ConvolutionBackward0")
SATURATING_READERS = PRODUCTS | SOFTMAXES | (NORMS - {RMS_NORM}) | CONVOLUTIONS
"""Nodes that may read a compressed sigmoid or tanh, or its product or sum with something else: a
gate, or a cap of scores. The gradient of a logarithm or a quotient is largest where the derivative
is smallest, and the error of its codes counts most there."""
POOLS = node_classes("AvgPool2DBackward0", "AvgPool3DBackward0")
ADAPTIVE_POOLS = node_classes("AdaptiveAvgPool2DBackward0", "AdaptiveAvgPool3DBackward0")
ELEMENTWISE_READERS = (SATURATING_READERS - SOFTMAXES) | SUMS | POOLS | ADAPTIVE_POOLS
"""Nodes that may read an elementwise product of two tensors, or a square, whose factors are
compressed. The gradient of a root, a logarithm or an inverse is largest where the product is
smallest, and the error of a factor counts most there; so is that of softmax(-x * x)."""
FACTOR_READERS = (
    ELEMENTWISE_READERS | SOFTMAXES | node_classes("LogsumexpBackward0") | frozenset(KERNELS)
)
"""Nodes that may read a matrix product, or a product with a broadcast tensor, whose factors are
compressed."""
Reason = str
Node = Any
Name = str | Callable[[Node, Any], str]


@dataclass(frozen=True)
class SavedBy:
    """A saved tensor of a known op.

    Args:
        attribute: Under which the node holds the tensor, without `_saved_`; of an
            `autograd.Function`, its number among the saved tensors.
        role: `input`, `input1` ... for an argument of the op, `saved` for its result or a mask.
        reason: Why the tensor may be compressed.
        allows: Whether this node is one where the reason holds; None: each one is.
        limit: The number below which all indices lie.
        readers: Nodes of the ops that may read the result; with another reader, the tensor is kept.
            A logarithm's or quotient's gradient is largest where the result is smallest, which is
            where the error of its codes is largest in proportion. None: any op.
    """

    attribute: str
    role: str
    reason: Reason
    allows: Callable[[Node], bool] | None = None
    limit: Callable[[Node], int] | None = None
    readers: frozenset[type] | None = None


@dataclass(frozen=True)
class KnownOp:
    """A row of the table.

    Args:
        node: Name of the class of autograd's nodes in `torch._C._functions`.
        name: The op's name in sites; or a function of the node and the torch function called.
        tensors: Saved tensors that may be compressed.
    """

    node: str
    name: Name
    tensors: tuple[SavedBy, ...]

    def op(self, node: Node, function: Any) -> str:
        """Return the op's name in sites."""
        return self.name if isinstance(self.name, str) else self.name(node, function)


_LINEAR_LAYERS, _DROPOUTS = callables("linear"), callables("dropout")


def _product(name: str) -> Name:
    """Name a matrix product: `linear` where the torch function called is that."""
    return lambda node, function: "linear" if function in _LINEAR_LAYERS else name


def _convolution(node: Node, function: Any) -> str:
    kind = "conv_transpose" if node._saved_transposed else "conv"
    return f"{kind}{len(node._saved_stride)}d"


def named(op: str, role: str, function: Any, attention: str) -> tuple[str, str]:
    """Return the op and tensor of a site, which are the function's where torch writes one out."""
    if attention and op in ("matmul", "softmax", "mul"):
        return attention, "saved"
    return ("dropout", "saved") if op == "mul" and function in _DROPOUTS else (op, role)


def _power(node: Node, function: Any) -> str:
    return "square" if _is_square(node) else "pow"


def _is_square(node: Node) -> bool:
    return node._saved_exponent == 2


def _reads_input(node: Node) -> bool:
    """Return whether a convolution's weight has a gradient, which the input's values go into."""
    return node.next_functions[1][0] is not None


def _reads_weight(node: Node) -> bool:
    return node.next_functions[0][0] is not None


def _not(allows: Callable[[Node], bool]) -> Callable[[Node], bool]:
    return lambda node: not allows(node)


def _evaluates(node: Node) -> bool:
    return not node._saved_training


def _rows(node: Node) -> int:
    return max(1, int(node._saved_weight_sym_argsize_0))


def _along(node: Node) -> int:
    sizes = node._saved_self_sym_sizes
    return max(1, int(sizes[_dim(node, len(sizes))])) if sizes else 1


def _dim(node: Node, dims: int) -> int:
    dim = node._saved_dim
    return dim - 2**64 if dim >= dims else dim  # torch gives a negative one as unsigned


def _along_self(node: Node) -> int:
    x = node._saved_self
    return max(1, x.shape[_dim(node, x.dim())]) if x.dim() else 1


def _plane(dims: int) -> Callable[[Node], int]:
    return lambda node: max(1, prod(node._saved_self.shape[-dims:]))


def _two(
    first: str, second: str, readers: frozenset[type] = FACTOR_READERS
) -> tuple[SavedBy, SavedBy]:
    return (
        SavedBy(first, "input", LINEAR, readers=readers),
        SavedBy(second, "input1", LINEAR, readers=readers),
    )


_FUSED_ATTENTION = (
    SavedBy("query", "input", EXPONENT),
    SavedBy("key", "input1", EXPONENT),
    SavedBy("value", "input2", LINEAR),
    SavedBy("output", "saved", RESULT),
)


_SHAPES = {
    "avg_pool": ("AvgPool2DBackward0", "AvgPool3DBackward0"),
    "adaptive_avg_pool": ("AdaptiveAvgPool2DBackward0", "AdaptiveAvgPool3DBackward0"),
    "pad": (
        *(f"ReflectionPad{n}DBackward0" for n in (1, 2, 3)),
        *(f"ReplicationPad{n}DBackward0" for n in (1, 2, 3)),
    ),
}

# An op of which memtrain has its own form, the node of torch's form, what that saves.
_SMOOTH = (
    ("gelu", "GeluBackward0", "self"),
    ("silu", "SiluBackward0", "self"),
    ("mish", "MishBackward0", "self"),
    ("elu", "EluBackward0", "self"),
    ("softplus", "SoftplusBackward0", "self"),
    ("logsigmoid", "LogSigmoidBackward0", "self"),
    ("hardswish", "HardswishBackward0", "self"),
)
_PIECEWISE = (
    ("relu", "ReluBackward0", "result"),
    ("hardtanh", "HardtanhBackward0", "self"),
    ("leaky_relu", "LeakyReluBackward0", "self"),
    ("hardsigmoid", "HardsigmoidBackward0", "self"),
    ("hardshrink", "HardshrinkBackward0", "self"),
    ("softshrink", "SoftshrinkBackward0", "self"),
    ("threshold", "ThresholdBackward0", "self"),
    ("clamp", "ClampBackward1", "self"),
    ("clamp_min", "ClampMinBackward0", "self"),
    ("clamp_max", "ClampMaxBackward0", "self"),
)
_SATURATING = (("sigmoid", "SigmoidBackward0", "result"), ("tanh", "TanhBackward0", "result"))
_NORMS = (
    ("layer_norm", "NativeLayerNormBackward0", "input"),
    ("group_norm", "NativeGroupNormBackward0", "input"),
    ("rms_norm", "FusedRmsNormBackward0", "input"),
)
_SAME_NODE = {function: name for name in ("relu6", "celu", "selu") for function in callables(name)}


def _replaced_op(name: str) -> Name:
    def named(node: Node, function: Any) -> str:
        if name == "gelu" and node._saved_approximate == "tanh":
            return "gelu_tanh"
        return _SAME_NODE.get(function, name)

    return named


TABLE: tuple[KnownOp, ...] = (
    KnownOp("MmBackward0", _product("matmul"), _two("self", "mat2")),
    KnownOp("BmmBackward0", "matmul", _two("self", "mat2")),
    KnownOp("AddmmBackward0", _product("addmm"), _two("mat1", "mat2")),
    KnownOp("BaddbmmBackward0", "matmul", _two("batch1", "batch2")),
    KnownOp("AddbmmBackward0", "matmul", _two("batch1", "batch2")),
    KnownOp("MvBackward0", "matmul", _two("self", "vec")),
    KnownOp("AddmvBackward0", "matmul", _two("mat", "vec")),
    KnownOp("GroupedMmBackward0", "grouped_mm", _two("self", "mat2")),
    KnownOp("MulBackward0", "mul", _two("self", "other", ELEMENTWISE_READERS)),
    KnownOp("ExpBackward0", "exp", (SavedBy("result", "saved", LINEAR, readers=PRODUCTS),)),
    KnownOp(
        "PowBackward0",
        _power,
        (SavedBy("self", "input", LINEAR, _is_square, readers=ELEMENTWISE_READERS),),
    ),
    KnownOp(
        "ConvolutionBackward0",
        _convolution,
        (
            SavedBy("input", "input", LINEAR, _reads_input),
            SavedBy("input", "input", SHAPE, _not(_reads_input)),
            SavedBy("weight", "input1", LINEAR, _reads_weight),
            SavedBy("weight", "input1", SHAPE, _not(_reads_weight)),
        ),
    ),
    *(KnownOp(node.__name__, ATTENTION, _FUSED_ATTENTION) for node in KERNELS),
    *(
        KnownOp(
            f"{kind}SoftmaxBackward0",
            "softmax",
            (SavedBy("result", "saved", PROBABILITIES, readers=PRODUCTS),),
        )
        for kind in ("", "Safe")
    ),
    KnownOp("LogSoftmaxBackward0", "log_softmax", (SavedBy("result", "saved", LOGARITHM),)),
    KnownOp("NllLossBackward0", "nll_loss", (SavedBy("self", "input", SHAPE),)),
    KnownOp("NllLoss2DBackward0", "nll_loss", (SavedBy("self", "input", SHAPE),)),
    *(
        KnownOp(
            f"{kind}BatchNormBackward0",
            "batch_norm",
            (
                SavedBy("input", "input", LINEAR, _evaluates),
                SavedBy("input", "input", REPLACED_OP, _not(_evaluates)),
            ),
        )
        for kind in ("Native", "Cudnn", "Miopen")
    ),
    *(
        KnownOp(node, name, (SavedBy("self", "input", SHAPE),))
        for name, nodes in _SHAPES.items()
        for node in nodes
    ),
    KnownOp(
        "EmbeddingBackward0", "embedding", (SavedBy("indices", "input", LOSSLESS, limit=_rows),)
    ),
    KnownOp(
        "GatherBackward0",
        "gather",
        (SavedBy("index", "input1", LOSSLESS, limit=_along_self), SavedBy("self", "input", SHAPE)),
    ),
    KnownOp(
        "IndexSelectBackward0",
        "index_select",
        (SavedBy("index", "input1", LOSSLESS, limit=_along),),
    ),
    KnownOp("IndexAddBackward0", "index_add", (SavedBy("source", "input3", SHAPE),)),
    KnownOp("IndexCopyBackward0", "index_copy", (SavedBy("source", "input3", SHAPE),)),
    KnownOp("TopkBackward0", "topk", (SavedBy("indices", "saved", LOSSLESS, limit=_along),)),
    KnownOp("SortBackward0", "sort", (SavedBy("indices", "saved", LOSSLESS, limit=_along),)),
    *(
        KnownOp(
            f"{kind}MaxPool{dims}D{end}Backward0",
            f"{name}max_pool{dims}d",
            (
                SavedBy("result1", "saved", LOSSLESS, limit=_plane(dims)),
                SavedBy("self", "input", SHAPE),
            ),
        )
        for kind, name, end in (("", "", "WithIndices"), ("Adaptive", "adaptive_", ""))
        for dims in (2, 3)
    ),
    *(
        KnownOp(node, _replaced_op(name), (SavedBy(attribute, "input", reason, readers=readers),))
        for reason, ops, readers in (
            (DERIVATIVE, _PIECEWISE, None),
            (DERIVATIVE, _SMOOTH, FACTOR_READERS),
            (DERIVATIVE, _SATURATING, SATURATING_READERS),
            (REPLACED_OP, _NORMS, None),
        )
        for name, node, attribute in ops
    ),
    KnownOp("WhereBackward0", "where", (SavedBy("condition", "input", LOSSLESS),)),
    KnownOp("MaskedFillBackward0", "masked_fill", (SavedBy("mask", "input1", LOSSLESS),)),
    KnownOp("NativeDropoutBackward0", "dropout", (SavedBy("result1", "saved", LOSSLESS),)),
)
"""Rows in the order in which the documentation prints them."""


_SYNC_BATCH_NORM: Any = _functions.SyncBatchNorm

KNOWN: dict[type, KnownOp] = {
    **{getattr(_F, row.node): row for row in TABLE if hasattr(_F, row.node)},
    _SYNC_BATCH_NORM._backward_cls: KnownOp(
        "SyncBatchNorm", "sync_batch_norm", (SavedBy("0", "input", PROBABILITIES),)
    ),
}
"""Class of a node -> the row of its op."""


def class_of(node: Any) -> type:
    """Return the class of a node, or of the node of torch that it stands for.

    bitsandbytes' products with frozen weights count as torch's.
    """
    if type(node) in REPLACED_NODES:
        return REPLACED_NODES[type(node)]
    module: Any = sys.modules.get("bitsandbytes.autograd._functions")
    if module is None or not hasattr(node, "_forward_cls"):
        return type(node)
    is_product = node._forward_cls in (module.MatMul4Bit, module.MatMul8bitLt)
    return _F.MmBackward0 if is_product else type(node)


MASKS = ("attn_mask", "attn_bias", "5")
"""Attributes under which attention, and `stand_in`, hold the bias that is made of a mask."""


def stand_in(
    function: type[torch.autograd.Function], results: Callable[..., Sequence[Tensor]]
) -> None:
    """Register an autograd Function that simulates fused attention as a known op.

    It saves the query, key, value, result, log-sum-exp and bias, in this order. `results` computes
    the result and the log-sum-exp of a query, key, value and bias.
    """
    roles = (("0", "input"), ("1", "input1"), ("2", "input2"), ("3", "saved"))
    tensors = tuple(SavedBy(attribute, role, EXPONENT) for attribute, role in roles)
    node = cast(Any, function)._backward_cls
    KNOWN[node] = KnownOp("stand-in", ATTENTION, tensors)
    KERNELS[node] = Kernel(results, None, ("0", "1", "2", "5"), ("3", "4"), {})


ALL: frozenset[type] = frozenset(node for node in vars(_F).values() if isinstance(node, type))
"""Classes of the nodes of torch's own ops, whose saved tensors can be read."""

CHECKPOINT: type = cast(Any, CheckpointFunction)._backward_cls
"""Class of the nodes of reentrant activation checkpointing, which save the inputs of a part."""

REPLACED_NODES: dict[type, type] = {}
"""Class of a node of memtrain's own autograd Functions, which save payloads -> the node of torch
whose output depends on its input in the same way."""


VIEWS = node_classes(
    *("AliasBackward0", "AsStridedBackward0", "DiagonalBackward0", "ExpandBackward0"),
    *("PermuteBackward0", "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "TBackward0"),
    *("TransposeBackward0", "TransposeBackward1", "UnsafeViewBackward0", "UnsqueezeBackward0"),
    *("ViewBackward0",),
)
"""Nodes that write nothing: their output is their input's memory."""
CASTS = node_classes("ToCopyBackward0")
"""Nodes that copy their input in another dtype."""
SAME_VALUES = (
    VIEWS
    | CASTS
    | node_classes(
        *("CloneBackward0", "MaskedFillBackward0", "NativeDropoutBackward0", "WhereBackward0")
    )
)
"""Nodes whose output has elements of their input, times one number, or 0."""
STAND_INS = VIEWS | CASTS | node_classes("WeightNormInterfaceBackward0", "CopyBackwards")
"""Nodes that may lie between a parameter and a tensor that stands for it."""
ACCUMULATE: type = _F.AccumulateGrad
COPY: type | None = getattr(_F, "CopyBackwards", None)
