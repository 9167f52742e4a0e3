"""Places of a module where a tensor becomes a number, an array or a decision, each of which waits for its device."""

from __future__ import annotations

import ast

_FACTS = {
    *("shape", "ndim", "dtype", "size", "name", "place", "placements", "process_mesh", "stop_gradient"),
    *("is_dist", "is_selected_rows", "_is_initialized", "data_ptr"),
}
"""Attributes and methods of a tensor that the host knows."""
_NUMBERS = ("int", "float", "bool")
_ARRAYS = ("numpy", "item", "tolist")
_SAME = (ast.Is, ast.IsNot, ast.In, ast.NotIn)


def host_copies(module: ast.Module) -> list[int]:
    """Lines of the copies that can be seen in the text: `.numpy()` and `.item()` of anything; of what is annotated as a
    tensor also other conversions, and tests of its values."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            tensors = _tensors(node)
            found |= {inner.lineno for inner in ast.walk(node) if _is_copy(inner, tensors)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            found |= {node.lineno} if node.func.attr in ("numpy", "item") else set()
    return sorted(found)


def _tensors(function: ast.FunctionDef) -> set[str]:
    """Names of the parameters and variables of a function that are annotated as tensors."""
    arguments = (*function.args.args, *function.args.kwonlyargs)
    annotated = {argument.arg: argument.annotation for argument in arguments}
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotated[node.target.id] = node.annotation
    kinds = ("Tensor", "Tensor | None")
    return {name for name, kind in annotated.items() if kind is not None and ast.unparse(kind) in kinds}


def _is_copy(node: ast.AST, tensors: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in _NUMBERS and len(node.args) == 1 and _is_value(node.args[0], tensors)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _ARRAYS and _is_value(node.func.value, tensors)
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return not isinstance(node.test, ast.Name) and _is_value(node.test, tensors)
    return False


def _is_value(node: ast.expr, tensors: set[str]) -> bool:
    """True for a tensor, an element of it, and what operators and its methods make of it."""
    if isinstance(node, ast.Name):
        return node.id in tensors
    if isinstance(node, ast.Attribute):
        return node.attr not in _FACTS and _is_value(node.value, tensors)
    if isinstance(node, ast.Subscript):
        return _is_value(node.value, tensors)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and _is_value(node.func, tensors)
    if isinstance(node, ast.Compare):
        return _is_value(node.left, tensors) and not any(isinstance(operator, _SAME) for operator in node.ops)
    if isinstance(node, ast.BinOp):
        return _is_value(node.left, tensors) or _is_value(node.right, tensors)
    return isinstance(node, ast.UnaryOp) and _is_value(node.operand, tensors)
