"""The reference of where each field of a job comes from."""

from __future__ import annotations

from collections.abc import Sequence

from docs.generate.tables import code, table
from reasoner.admission.sources import Source
from reasoner.jobs.spec import JobSpec


def page(sources: Sequence[Source]) -> str:
    """Return the page."""
    request, *others = sources
    numbered = [
        (str(number), source.name, ", ".join(code(name) for name in source.sets), source.description)
        for number, source in enumerate(others, 2)
    ]
    setters = {name: [source.name for source in sources if name in source.sets] for name in JobSpec.model_fields}
    by_field = [(code(name), " > ".join(named)) for name, named in setters.items() if len(named) > 1]
    return "\n".join(
        [
            "# Defaults\n",
            "A client may leave almost everything of a job open. What is stored, and echoed in the `spec` of a job, "
            "says all: each field is from the first of these sources that has it. `sampling`, `budget`, `answer` and "
            "`chat_template_kwargs` are merged field by field, and so is the service's process reward model with a "
            "verifier of this kind that names none. `null` switches a default off where a field may be null; in "
            "`sampling` it asks for the served model's own value, in `budget` it leaves a limit open.\n",
            table(
                ("", "source", "fields", "what it has"),
                [("1", request.name, "all", request.description), *numbered],
            ),
            "## By field\n",
            "The job is then completed by what is known of its models and its strategy: the other parameters of the "
            "strategy, the format of calls that a chat template shows, and the job's own model for a verifier without "
            "one. At last it is checked once, as it will run; a refusal says so if the value at fault is not the "
            "client's. Fields that are not listed are the request's, else they have the default of the schema.\n",
            table(("field", "sources, the first that has it"), by_field),
        ]
    )
