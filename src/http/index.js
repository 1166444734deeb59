placeholder {{base}}
