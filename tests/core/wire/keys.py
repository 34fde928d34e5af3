"""Keys of the tests of CURVE."""

from flexmarl.core.wire.curve import Keys

KEYS = Keys.make()
