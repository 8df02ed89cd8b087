"""``SHMSERVE_POLYNOMIAL_…``, or the table ``[polynomial]``."""

from shmserve.config import ExtensionSettings


class PolynomialSettings(ExtensionSettings, frozen=True):
    """`largest`: limit of |x|; larger arguments are refused."""

    largest: float = 1e6
