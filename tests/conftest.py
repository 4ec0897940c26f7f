import sys
from pathlib import Path

# With --import-mode=importlib the helper modules beside the tests need a path of their own.
sys.path.insert(0, str(Path(__file__).parent))
