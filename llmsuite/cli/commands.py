"""The commands that come with llmsuite, registered as a plugin. Each command's module does its own imports."""

from __future__ import annotations

from llmsuite.cli import (
    calibrate,
    checkpoints,
    completion,
    data,
    doctor,
    evaluate,
    export,
    generate,
    import_model,
    list_things,
    merge,
    plan,
    plugins,
    push,
    recipe,
    run,
    runs,
    schema,
    serve,
    show,
    validate,
)
from llmsuite.contract.hookspecs import hookimpl
from llmsuite.contract.specs import Command


@hookimpl
def llmsuite_register_commands() -> list[Command]:
    return [
        run.COMMAND,
        validate.COMMAND,
        plan.COMMAND,
        show.COMMAND,
        list_things.COMMAND,
        recipe.COMMAND,
        import_model.COMMAND,
        merge.MERGE,
        merge.CONVERT,
        push.COMMAND,
        data.COMMAND,
        checkpoints.COMMAND,
        runs.RUNS,
        runs.REPORT,
        runs.WATCH,
        generate.COMMAND,
        serve.COMMAND,
        evaluate.COMMAND,
        calibrate.COMMAND,
        export.EXPORT,
        export.VERIFY,
        export.DEPLOY,
        schema.COMMAND,
        plugins.COMMAND,
        doctor.COMMAND,
        completion.COMMAND,
    ]
