"""Steps of optimizers inside `torch.compile`: called, not traced."""

from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(step: _F) -> _F:
    """Exclude a function and its callees from `torch.compile`.

    A step keeps tables of addresses and launches kernels of its own: there is nothing to compile,
    and Dynamo does not follow its Python to the same end. `torch.compiler.disable` does this too,
    but imports the compiler.

    Args:
        step: A method, inside of its other decorators.

    Returns:
        The function, changed.

    Example:
        >>> untraced(lambda: 1)()
        1
    """
    vars(step)["_torchdynamo_disable"] = True  # where the caller is traced
    try:
        from torch._C._dynamo import eval_frame

        action: Any = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(action, action)
        eval_frame.set_code_exec_strategy(step.__code__, strategy)  # where it is the first frame
    except (AttributeError, ImportError):
        return step  # of a torch without these
    return step
