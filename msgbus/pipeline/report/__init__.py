"""A report: one HTML file on everything that a bus did, to be opened anywhere."""

from msgbus.pipeline.report.collect import collect
from msgbus.pipeline.report.data import ReportData
from msgbus.pipeline.report.page import render
from msgbus.pipeline.report.writing import write_report

__all__ = ["ReportData", "collect", "render", "write_report"]
