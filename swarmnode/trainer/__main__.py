"""`python -m swarmnode.trainer --config FILE`: the process that the supervisor starts. Only this
process loads torch and transformers."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from swarmnode import environment
from swarmnode.config import Config
from swarmnode.errors import Unavailable
from swarmnode.install import torch_failure
from swarmnode.observe import logs
from swarmnode.process import Progress, die_with_parent, loading_modules, run_main
from swarmnode.tasks import registry


def main() -> int:
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # nothing to save yet
    progress = Progress()
    config = Config.model_validate_json(Path(sys.argv[sys.argv.index("--config") + 1]).read_bytes())
    registry.install(config.task.modules, config.task.settings, config.task.names)
    registry.install_datasets(config.task.datasets, config.node.data_dir / registry.DATASETS)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    progress("loading torch")
    logs.configure(config.log, "trainer", data_dir=config.node.data_dir)
    with loading_modules():
        try:
            import torch  # noqa: F401
        except Exception as error:
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            names = ", ".join(environment.library_variables())
            if names:
                cause += f" (set in the environment: {names})"
            raise Unavailable(torch_failure(cause)) from error
        from swarmnode.stages.trainer.crew_trainer import make_trainer
        from swarmnode.trainer.loop import Trainer

    # Again, because the import of transformers installs its own log handler.
    logs.configure(config.log, "trainer", data_dir=config.node.data_dir)
    trainer = make_trainer(config, progress)

    def stop(*_: object) -> None:
        trainer.stop()
        if isinstance(trainer, Trainer) and trainer.is_loading:
            sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    trainer.run()
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode trainer", main))
