"""Tests of the rules and dashboards of monitoring, the chart and the images that deploy the service."""
