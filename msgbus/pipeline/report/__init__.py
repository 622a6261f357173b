"""The report: one self-contained HTML file with charts of what a bus did.

Imported by `Pipeline.report` and by users; imports the jobs.
"""

from msgbus.pipeline.report.collect import collect, write_report
from msgbus.pipeline.report.data import ReportData
from msgbus.pipeline.report.page import render

__all__ = ["ReportData", "collect", "render", "write_report"]
