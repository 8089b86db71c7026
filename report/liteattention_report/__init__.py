"""Reports as one HTML file each, without a network: the page, its tables and its charts.

The suite (:mod:`liteattention_e2e.page`) and the benchmarks (:mod:`liteattention_benchmark.pages`)
say what is on a page; templates, style sheets and scripts are here and are written into the file.
"""

from .charts import Chart, Series, bar_chart, chart
from .page import base64_text, render, size_text
from .tables import Cell, Table, figure_cells, ratio_cells, text_cells

__all__ = [
    "Cell",
    "Chart",
    "Series",
    "Table",
    "bar_chart",
    "base64_text",
    "chart",
    "figure_cells",
    "ratio_cells",
    "render",
    "size_text",
    "text_cells",
]
