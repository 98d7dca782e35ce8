"""Lets a bare virtual environment see what this one has installed, but not its editable install of the project.

Run: python tests/wheel_environment.py DIRECTORY_OF_A_VENV
"""

import sys
import sysconfig
from pathlib import Path


def main() -> None:
    target = Path(sys.argv[1]) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A path line is added as it is: the .pth files in that folder, the editable install's too, are not read.
    (target / "installed.pth").write_text(sysconfig.get_path("purelib") + "\n")


if __name__ == "__main__":
    main()
