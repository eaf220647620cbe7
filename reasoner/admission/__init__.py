"""Admission of jobs: turns what a client says into the job that will run, and refuses what cannot.

``resolve.py`` is the door; ``sources.py`` says where each field comes from, ``check.py`` what is refused;
``defaults.py`` and ``effort.py`` are the operator's settings, ``calibration.py`` and ``model_checks.py`` the checks of
files when a service starts.
"""

from __future__ import annotations

from reasoner.jobs.job import Job
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec

# The verifiers of other packages can be imported by now. What holds a job, such as a route, is built at once again.
for _model in (JobRequest, JobSpec, Job):
    _model.model_config["defer_build"] = False
    _model.model_rebuild()
