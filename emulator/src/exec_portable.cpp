#define VARIANT portable
#include "exec_impl.h"
