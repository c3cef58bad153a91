"""True decode shares in the place of a prediction. Only a simulation knows them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eldr.routing.predictor import Predictor
from eldr.signature.expert_signature import ExpertSignature
from eldr.simulator.world import Prompt


class OracleShares(Predictor):
    """Answers with the true shares of prompts that were revealed, told apart by their signature object."""

    def __init__(self) -> None:
        super().__init__()
        self._shares: dict[int, tuple[ExpertSignature, npt.NDArray[np.float32]]] = {}

    def reveal(self, prompts: Sequence[Prompt]) -> None:
        """Makes the shares of these prompts known."""
        for prompt in prompts:
            # The signature is kept, so that its id stays its own.
            self._shares[id(prompt.signature)] = prompt.signature, prompt.shares.reshape(-1)

    def shares(self, signature: ExpertSignature) -> npt.NDArray[np.float32]:
        """See `Predictor.shares`. Raises KeyError for a signature whose prompt was not revealed."""
        return self._shares[id(signature)][1]
