import pytest

# Asserts of these helpers explain themselves as those of tests do.
pytest.register_assert_rewrite("tests.plan.breaking", "tests.plan.replay")
