"""Number types of recipe keys."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
BatchSize = Annotated[int, Gt(0), Le(1 << 20)]
Rank = Annotated[int, Gt(0), Le(65536)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
MixWeight = Annotated[float, Gt(0), Le(1e6)] | None
