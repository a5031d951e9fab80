"""Analyse batch composition: a store, a plan, a run, or several side by side."""

from dflash_tools.report.compare_report import report_compare
from dflash_tools.report.document import Report
from dflash_tools.report.plan_report import report_plan
from dflash_tools.report.run_report import report_run
from dflash_tools.report.store_report import report_store
from dflash_tools.report.terminal import print_report
from dflash_tools.report.write import write_report

__all__ = ["Report", "print_report", "report_compare", "report_plan", "report_run", "report_store", "write_report"]
