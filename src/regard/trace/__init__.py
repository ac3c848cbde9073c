"""Traces: what a model attended to, recorded at full speed, kept, and looked at later.

    with record(model, tokenizer=tokenizer) as trace:
        model(tokens)
    print(trace.statistics())
    trace.save("text.trace");  Trace.open("text.trace")[2, 5].heatmap()

| file | what it does |
|---|---|
| recording | listens to a model |
| passes | joins the steps of a generation |
| naming, labels | what modules and tokens are called |
| keeping | memory up to a bound, disk beyond it |
| stored | descriptions as plain data, and back |
| files, writing, reading | one safetensors file, checked when it is opened |
| looks | `Trace`: A by layer and head |
| statistics, shares, rollout, comparing, tables | what can be said about all heads at once |
"""

from .files import is_trace
from .labels import labels_of
from .looks import Look, Trace
from .recording import record
from .tables import Table

__all__ = ["Look", "Table", "Trace", "is_trace", "labels_of", "record"]
