"""Pure analyzers: one subpackage per question a user asks. No printing, no files, no globals."""
