"""Autograd graphs, for tests that look at saved tensors."""


def graph_nodes(output):
    """Every node of the graph that an output's backward would run, each once."""
    nodes, waiting = {}, [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            waiting += [above for above, _ in node.next_functions]
    return list(nodes)
