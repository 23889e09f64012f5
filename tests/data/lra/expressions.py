"""Evaluate ListOps expressions independently of the code that makes them."""

from subquad.data.lra.listops import CLOSE, MAX, MED, MIN, SM


def solve(tokens: list[int]) -> tuple[int, int]:
    """Return the value of an expression and the depth of its deepest node, by a stack machine."""
    stack: list[int] = []
    deepest = depth = 0
    for token in tokens:
        if token != CLOSE:
            stack.append(token)
            deepest = max(deepest, depth + 1)
            depth += token >= MIN
            continue
        arguments: list[int] = []
        while stack[-1] < MIN:
            arguments.append(stack.pop())
        assert 2 <= len(arguments) <= 10
        arguments.sort()
        median = (arguments[(len(arguments) - 1) // 2] + arguments[len(arguments) // 2]) // 2
        stack.append({MIN: arguments[0], MAX: arguments[-1], MED: median, SM: sum(arguments) % 10}[stack.pop()])
        depth -= 1
    (value,) = stack
    return value, deepest
