"""The report of a conversion: ``report.html``, which needs nothing but a browser, and its data, ``report.json``."""

from mla_convert.report.data import JSON_NAME
from mla_convert.report.details import LayerDetails, ReportDetails
from mla_convert.report.writing import HTML_NAME, write_report

__all__ = ["HTML_NAME", "JSON_NAME", "LayerDetails", "ReportDetails", "write_report"]
