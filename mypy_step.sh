cd /tmp/wt/step
mkdir -p build/types
sed -n 20,28p Makefile | grep -n "ln" 
